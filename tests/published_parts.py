"""Models whose weights are not all parameters, loaded by several processes in every sharding and published without being trained.

`python published_parts.py FOLDER FAMILY CASE...`: families.py says what a family is, parallel_updates.py what a case is. It fails where a
weight differs in one bit from what one process alone publishes, where what lies beside the weights is not what lay beside the first
model's, or where the processes compute other log-probabilities.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from families import write_family
from parallel_updates import Case, import_before_forking
from safetensors.torch import load_file
from zero_checkpoints import begin, in_place

#: beside the weights: transformers would not write the first, and knows nothing of the others
BESIDE = {
    "generation_config.json": '{"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 3]}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tool_use.jinja": "{{ tools }}",
    "preprocessor_config.json": '{"size": 64}',
    "notes/licence": "nobody's",
}


def beside(folder: Path) -> dict[str, bytes]:
    """What lies beside the weights of a model, by its path."""
    paths = [path for path in folder.rglob("*") if path.is_file() and "safetensors" not in path.name]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def published(case: Case, folder: Path) -> tuple[dict[str, Any], Any]:
    """The weights by name, and the log-probabilities of some tokens."""
    out = folder / case.text

    def act(rank: int) -> None:
        trainer = begin(case, folder, None)
        tokens = torch.arange(2, 18)[None]
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        wanted = tokens > 2
        with torch.no_grad():
            found = trainer.backend.model(inputs, wanted, 1.0)[0]
        trainer.save(out, model_folder=folder / "model", policy_version=1)
        if rank == 0:
            torch.save(found, folder / f"{case.text}.found")

    in_place(case, folder, act)
    weights = {}
    for file in (out / "model").glob("*.safetensors"):
        weights |= load_file(file)
    return weights, torch.load(folder / f"{case.text}.found", weights_only=True)


def main(folder: Path, family: str, cases: list[str]) -> None:
    torch.set_num_threads(1)
    import_before_forking(cases)
    folder.mkdir(exist_ok=True)
    model = write_family(family, folder / "model")
    # As it is published: each parameter in bfloat16, and what is no parameter is more exact.
    for one in model.parameters():
        one.data = one.data.bfloat16()
    model.save_pretrained(folder / "model")
    for name, text in BESIDE.items():
        (folder / "model" / name).parent.mkdir(exist_ok=True)
        (folder / "model" / name).write_text(text)
    lay = beside(folder / "model")
    for dtype in sorted({Case(one).dtype for one in cases}):
        more = ":bf16" if dtype == "bfloat16" else ""
        weights, found = published(Case(f"1x1:none:24{more}"), folder)
        biases = [name for name in weights if name.endswith("e_score_correction_bias")]
        first = load_file(folder / "model" / "model.safetensors")
        assert biases and all(torch.equal(weights[one], first[one]) for one in biases), dtype
        assert all(len(first[one].unique()) == len(first[one]) for one in biases)
        for text in (one for one in cases if Case(one).dtype == dtype):
            others, computed = published(Case(text), folder)
            assert weights.keys() == others.keys(), text
            lies = beside(folder / text / "model")
            if dtype == "float32":
                config, stored = (json.loads(one.pop("config.json")) for one in (lies, {**lay}))
                assert config == {**stored, "dtype": "float32"}
            assert {name: one for name, one in lay.items() if name in lies} == lies, text
            assert lay.keys() - lies.keys() == ({"config.json"} if dtype == "float32" else set()), text
            apart = [
                name
                for name, one in weights.items()
                if one.dtype != others[name].dtype or not torch.equal(one, others[name])
            ]
            assert not apart, f"{text}: {apart}"
            torch.testing.assert_close(computed, found, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
