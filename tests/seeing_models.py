"""Tiny models that take images, of other families than the one of scripts/picture_model.py, with random weights and the same tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from trainer_bench import REPO

sys.path.insert(0, str(REPO / "scripts"))

TEXT: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048},
}
VISION: dict[str, Any] = {
    **{"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "out_hidden_size": 128,
}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
#: of Qwen's: its processor, that of videos, and a patch's side
QWEN = {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLVideoProcessor", 14),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor", 14),
    "qwen3_5": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor", 16),
}


def rope(**more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **more}}


def seeing_model(family: str) -> Any:
    """A model of this family (transformers' `model_type`)."""
    import torch
    import transformers
    from picture_model import build_model

    torch.set_num_threads(1)
    known = build_model(0).config
    image = {"image_token_id": known.image_token_id}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ids = {name: getattr(known, name) for name in names}
    text = {
        **TEXT,
        "eos_token_id": known.text_config.eos_token_id,
        "pad_token_id": known.text_config.pad_token_id,
    }
    common = {"tie_word_embeddings": False, "initializer_range": 0.05}
    parts = rope(mrope_section=[4, 6, 6])
    torch.manual_seed(0)
    match family:
        case "qwen2_vl":
            vision = {**VISION, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
            config = transformers.Qwen2VLConfig(
                text_config=text | parts, vision_config=vision, **ids, **common
            )
            return transformers.Qwen2VLForConditionalGeneration(config)
        case "qwen2_5_vl":
            vision = {**VISION, **WIDE, "window_size": 56, "fullatt_block_indexes": [1]}
            config = transformers.Qwen2_5_VLConfig(
                text_config=text | parts, vision_config=vision, **ids, **common
            )
            return transformers.Qwen2_5_VLForConditionalGeneration(config)
        case "qwen3_5":
            linear = {f"linear_{kind}_head_dim": 32 for kind in ("key", "value")}
            linear |= {f"linear_num_{kind}_heads": 2 for kind in ("key", "value")}
            parts = rope(mrope_section=[2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)
            text |= {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
            vision = {**VISION, **WIDE, "patch_size": 16, "num_position_embeddings": 64}
            config = transformers.Qwen3_5Config(
                text_config=text | linear | parts, vision_config=vision, **ids, **common
            )
            return transformers.Qwen3_5ForConditionalGeneration(config)
        case "llava":
            vision = {
                **WIDE,
                "model_type": "clip_vision_model",
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            }
            vision |= {"image_size": 64, "patch_size": 16, "projection_dim": 64}
            config = transformers.LlavaConfig(
                text_config={**text, "model_type": "llama"},
                vision_config=vision,
                image_seq_length=16,
                **image,
                **common,
            )
            return transformers.LlavaForConditionalGeneration(config)
    raise ValueError(family)


def write_seeing_model(model: Any, folder: Path) -> None:
    """The model with its tokenizer and its processors."""
    from picture_model import build_tokenizer, write_model

    family = model.config.model_type
    if family == "qwen3_vl":
        write_model(model, folder)
        return
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if family == "llava":
        own = {"processor_class": "LlavaProcessor", "patch_size": 16, "num_additional_image_tokens": 1}
        own |= {"vision_feature_select_strategy": "default", "image_token": "<|image_pad|>"}
        size = {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}
        image = {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            **size,
            **half,
        }
        written = {"processor_config": own, "preprocessor_config": image}
        _as_published(folder / "model.safetensors")
    else:
        processor, video, patch = QWEN[family]
        both = {
            "processor_class": processor,
            "patch_size": patch,
            "merge_size": 2,
            "temporal_patch_size": 2,
            **half,
        }
        both["size"] = {"shortest_edge": 1024, "longest_edge": 65536}
        written = {
            "preprocessor_config": {**both, "image_processor_type": "Qwen2VLImageProcessorFast"},
            "video_preprocessor_config": {**both, "video_processor_type": video},
        }
    for name, content in written.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def _as_published(file: Path) -> None:
    """The names that LLaVA's published weights have, and vLLM wants; transformers writes others for a model that it has made."""
    from safetensors.torch import load_file, save_file

    own, theirs = "vision_tower.", "vision_tower.vision_model."
    found = load_file(file)
    save_file(
        {name.replace(own, theirs): one for name, one in found.items()}, file, metadata={"format": "pt"}
    )
