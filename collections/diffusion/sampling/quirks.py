"""Behaviour of a reference sampler that no run wants, and that its recorded tokens need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReferenceQuirks:
    """Faults of dllm's samplers, all off; ``presets.py`` turns on what reproduces each of them token for token.

    Attributes:
        mask_token_allowed: the mask token may be chosen. Its position stays a hole, though the step has spent a
            commitment on it, so a run may end with holes.
        stray_masks_compete: mask tokens of the prompt and of earlier blocks take commitments of the block at hand
            without being counted in its schedule, so holes may be left over.
        begin_suppress_by_confidence: ``begin_suppress_token_ids`` are not forbidden at the first token: they have
            probability 0 when confidences are compared, at every position.
        topk_ties: positions of equal score come in the order that ``torch.topk`` happens to give on the row's canvas,
            rather than the lowest first.
        pad_ids_are_padding: a pad token inside a prompt is not attended to, and positions do not count it.
        global_noise: noise comes from torch's global generator for whole batches at once.
        lockstep: a row that has filled its block waits for the others. (With an exact cache it always does.)
        stop_after_block: the run ends when every row has finished a block with an end token in it; what follows stays
            masked.
    """

    mask_token_allowed: bool = False
    stray_masks_compete: bool = False
    begin_suppress_by_confidence: bool = False
    topk_ties: bool = False
    pad_ids_are_padding: bool = False
    global_noise: bool = False
    lockstep: bool = False
    stop_after_block: bool = False
