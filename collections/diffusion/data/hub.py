"""The Hugging Face Hub, where nobody answers: its clients ask five times more for each file, over half a minute."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hub_or_its_cache(name: str, repo_type: str = "model") -> Iterator[None]:
    """Within it, all libraries take what they need from the Hub's cache alone where the Hub does not answer.

    That is what ``HF_HUB_OFFLINE=1`` asks for; here a single request decides, of ``HF_HUB_ETAG_TIMEOUT`` seconds at
    most (10 by default) for each address of the Hub.

    Args:
        name: of the repository that is wanted.
        repo_type: ``model`` or ``dataset``.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import reset_sessions

    was_offline = constants.HF_HUB_OFFLINE
    if was_offline or _answers(name, repo_type):
        yield
        return
    constants.HF_HUB_OFFLINE = True
    # Only new sessions look at it.
    reset_sessions()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = was_offline
        reset_sessions()


def _answers(name: str, repo_type: str) -> bool:
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=repo_type, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (HfHubHTTPError, HFValidationError):
        # An answer too; whoever wants the files says what is wrong with it.
        return True
    except OSError:
        return False
    return True
