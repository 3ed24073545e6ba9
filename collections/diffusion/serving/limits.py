"""What one server takes on."""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on requests, batches and the queue; every one is at least 1.

    Attributes:
        max_batch_rows: rows that are denoised together.
        max_batch_tokens: positions of a batch, padding included. A longer row runs alone.
        max_waiting_rows: rows in the queue; a request that finds no room is refused with status 429.
        max_rows_per_request: prompts times samples of one request.
        max_completion_tokens: tokens per completion that a request may ask for.
        max_body_bytes: size of a request.
        timeout_seconds: from a request's arrival to its last token.
        shutdown_seconds: for running requests to end when the server is told to stop.
    """

    max_batch_rows: int = 16
    max_batch_tokens: int = 16_384
    max_waiting_rows: int = 256
    max_rows_per_request: int = 16
    max_completion_tokens: int = 1_024
    max_body_bytes: int = 1_000_000
    timeout_seconds: float = 300.0
    shutdown_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 1:
                raise ValueError(f"{field.name}={value} must be at least 1")
