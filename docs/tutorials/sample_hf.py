"""Continue a text with an exported diffusion checkpoint, loaded by transformers alone; no NeMo is imported.

python docs/tutorials/sample_hf.py runs/shakespeare/hf --prompt "ROMEO:"
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from nemo_dllm.collections.diffusion.sampling import SamplerConfig, generate


def main() -> None:
    """Load, fill masks, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompt", default="")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--steps", type=int, help="forward passes; default: one per token")
    parser.add_argument("--block-size", type=int, default=32, help="tokens that are filled before those behind them")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The folder's own code: read modeling_a2d.py before you trust a folder from elsewhere.
    model = AutoModelForMaskedLM.from_pretrained(arguments.folder, trust_remote_code=True).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder, trust_remote_code=True)  # It reads config.json first.
    settings = json.loads((arguments.folder / "config.json").read_text())

    @torch.no_grad()
    def denoiser(tokens_BT: torch.Tensor, *, key_mask_BT: torch.Tensor | None) -> torch.Tensor:
        return model(tokens_BT, attention_mask=key_mask_BT).logits

    result = generate(
        denoiser,
        [tokenizer(arguments.prompt, add_special_tokens=False)["input_ids"]],
        SamplerConfig(
            max_new_tokens=arguments.max_new_tokens,
            steps=arguments.steps,
            block_size=arguments.block_size,
            temperature=arguments.temperature,
            seed=arguments.seed,
            right_shift=settings["right_shift_logits"],
            eos_token_id=tokenizer.eos_token_id,
        ),
        mask_token_id=settings["mask_token_id"],
        device=device,
    )
    print(tokenizer.decode(result.sequences[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
