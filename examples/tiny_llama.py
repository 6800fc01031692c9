"""Make a tiny Llama checkpoint with random weights, the same at every run; nothing is downloaded.

    python examples/tiny_llama.py /some/folder

The model answers nonsense, but its greedy text depends on every token of the prompt. So if two
engines give the same text for a prompt, they have the same KV cache.
"""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SEED = 20
WORDS = ["".join(letters) for letters in itertools.product("bdfghjklmnprstvz", "aeio", "klmnprst")]
"""The vocabulary: 512 words of three letters. Token id *i* is word *i*."""


def build(folder: Path, *, max_tokens: int = 1024, seed: int = SEED, **shape: int) -> Path:
    """Write a Llama's checkpoint and tokenizer into a folder, and return the folder.

    It has 4 layers, 4 query heads and 2 KV heads of 32 elements, unless ``shape`` has other
    arguments of ``LlamaConfig``. A prompt and its answer have ``max_tokens`` together.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            **{
                "vocab_size": len(WORDS),
                "hidden_size": 128,
                "intermediate_size": 256,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
            }
            | shape,
            max_position_embeddings=max_tokens,
            bos_token_id=None,
            eos_token_id=None,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=_spread(name))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def _spread(name: str) -> float:
    """Return the standard deviation for the random values of a weight matrix.

    With transformers' default (0.02), the last token's embedding would dominate, and the logits
    would be nearly equal. With large output projections, what attention gathers from the prompt
    does.
    """
    if "o_proj" in name:
        return 1.0
    return 0.2 if "proj" in name else 1.0


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are ``WORDS``, separated by spaces in the text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    ids = {word: id_ for id_, word in enumerate(WORDS)}
    words = Tokenizer(models.WordLevel(ids, unk_token=WORDS[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids as a prompt; of other length or seed, it begins with other tokens."""
    rng = random.Random(f"{length}:{seed}")
    return [rng.randrange(len(WORDS)) for _ in range(length)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    print(build(parser.parse_args().folder))
