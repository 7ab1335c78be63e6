"""A tiny model that sees images, and images for it.

BLIP-2, because most of vLLM's other models with images import torchvision.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvfold.testing.checkpoints import build_once, draw_weights

_RECIPE = 1  # raise when what is written changes
_SIDE = 56
_SEES = {"num_hidden_layers": 2, "num_attention_heads": 1, "hidden_size": 64}
_VOCAB, _IMAGE = 512, 7


def blip2(root: Path | str, *, seed: int = 0) -> Path:
    """Return a BLIP-2 checkpoint with its processor: OPT, 4 layers with 4 KV heads.

    An engine puts 8 tokens for the image before the prompt's, which must not hold token 7.
    """
    return build_once(Path(root) / f"blip2-s{seed}-{_RECIPE}", lambda folder: _save(folder, seed))


def image(seed: int) -> Any:
    """Return a `PIL.Image` of noise, the same for the same seed."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def _save(folder: Path, seed: int) -> None:
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    config = Blip2Config(
        vision_config={**_SEES, "intermediate_size": 128, "image_size": _SIDE, "patch_size": 14},
        qformer_config={
            **_SEES,
            "intermediate_size": 128,
            "encoder_hidden_size": 64,
            "vocab_size": _VOCAB,
        },
        text_config={
            "model_type": "opt",
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "hidden_size": 256,
            "ffn_dim": 512,
            "word_embed_proj_dim": 256,
            "vocab_size": _VOCAB,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
        num_query_tokens=8,
        image_token_index=_IMAGE,
        image_token_id=_IMAGE,
        tie_word_embeddings=False,
    )
    model = Blip2ForConditionalGeneration(config).float()
    draw_weights(model, seed)
    model.save_pretrained(folder)
    _save_processor(folder)


def _save_processor(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import Blip2Processor, PreTrainedTokenizerFast
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    special = {1: "<pad>", 2: "</s>", 3: "<unk>", _IMAGE: "<image>"}
    words = {special.get(i, f"t{i}"): i for i in range(_VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    Blip2Processor(
        BlipImageProcessorPil(size={"height": _SIDE, "width": _SIDE}),
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            unk_token="<unk>",
            bos_token="</s>",
            eos_token="</s>",
            pad_token="<pad>",
            extra_special_tokens={"image_token": "<image>"},
        ),
        num_query_tokens=8,
    ).save_pretrained(folder)
