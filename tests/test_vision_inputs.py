"""Images: seen by the engine as they are trained on, in families of vision models."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from seeing_models import seeing_model, write_seeing_model
from test_rollout import make_spec, rolled_out, run
from trainer_bench import (
    REPO,
    Bench,
    first_weights,
    largest_difference,
    rollouts,
    settings,
    trajectory,
    write_groups,
)

from fsbarrier.cli.start.task_files import read_tasks
from fsbarrier.engine.engine import Engine
from fsbarrier.engine.frozen import FrozenEngine
from fsbarrier.engine.model import inspect, placeholder_ids
from fsbarrier.engine.replicas import Replicas
from fsbarrier.errors import ProgramFailed, UsageError
from fsbarrier.network.listening import LOOPBACK
from fsbarrier.rewards.judge import Judge
from fsbarrier.rollouts.pictures import STAND_IN
from fsbarrier.rundir import checkpoints
from fsbarrier.settings.resolve import resolve
from fsbarrier.settings.sections import FrozenEngineSettings, JudgeSettings

sys.path.insert(0, str(REPO / "scripts"))


def vision_model(folder: Path, *, tied: bool = False) -> Any:
    """A tiny model that takes images, in `folder`; gives it in memory."""
    import torch
    from picture_model import build_model, write_model

    torch.set_num_threads(1)
    model = build_model(0, tied=tied).eval()
    write_model(model, folder)
    return model


def masked(model: Any) -> Any:
    """A model whose placeholders are never sampled, as the engine is asked to."""
    import torch

    config = model.config
    never = [config.image_token_id, config.video_token_id]

    def answer(**given: Any) -> Any:
        found = model(**given)
        found.logits[..., never] = -torch.inf
        return found

    return answer


def looked(tmp_path: Path) -> Path:
    """A model, and a merged file of its rollouts of up to two images of different sizes; gives the images' folder."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor

    from fsbarrier.data import images

    model = vision_model(tmp_path / "model")
    ask, processor = masked(model), AutoImageProcessor.from_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(1)
    folder, pad = tmp_path / "train_images.iteration1", model.config.image_token_id
    begin, end = model.config.vision_start_token_id, model.config.vision_end_token_id
    groups = []
    for task in range(4):
        group = []
        for sample in range(4):
            # Up to two images of different sizes, and none for some.
            names, tokens, seen = [], [65, 66], []
            for number in range((task + sample) % 3):
                size = (64 + 32 * number, 64)
                noise = torch.randint(0, 256, (*size[::-1], 3), generator=generator, dtype=torch.uint8)
                picture = Image.fromarray(noise.numpy())
                picture.save(tmp_path / "one.png")
                names.append(images.keep(folder, images.data_of(str(tmp_path / "one.png"))))
                seen.append(processor(images=[picture], return_tensors="pt"))
                tokens += [begin, *[pad] * (size[0] // 32 * size[1] // 32), end, 67]
            answer = torch.randint(0, 250, (3 + task,), generator=generator).tolist()
            ids = torch.tensor([[*tokens, *answer]])
            given = (
                {
                    "pixel_values": torch.cat([one["pixel_values"] for one in seen]),
                    "image_grid_thw": torch.cat([one["image_grid_thw"] for one in seen]),
                    "mm_token_type_ids": (ids == pad).long(),
                }
                if seen
                else {}
            )
            with torch.no_grad():
                logits = ask(input_ids=ids, **given).logits[0, :-1]
            chosen = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[len(tokens) - 1 :, 0]
            one = trajectory(task, sample, ids[0].tolist(), chosen.tolist(), float(sample % 2))
            group.append({**one, "split": "train", "iteration": 1, "images": [names]})
        groups.append(group)
    write_groups(tmp_path / "merged", groups)
    return folder


@pytest.mark.torch
def test_images_are_trained_on_as_the_engine_saw_them(tmp_path: Path) -> None:
    """The log-probabilities are those of the model itself, on its processor's pixels. All of it is published, and only its language model
    has changed. A processor that cuts images otherwise than the engine did is refused, and so is a file that was changed since."""
    folder = looked(tmp_path)
    work = Bench(tmp_path, settings(algorithm__kl_coef=0.1))
    work.prepare()
    result = work.update("v1", reference=str(tmp_path / "model"))
    assert result["logprob_gap_max"] < 1e-4 and result["optimizer_steps"] > 1
    before, after = first_weights(tmp_path), work.weights("v1")
    assert largest_difference(before, after) > 1e-4
    seeing = {name for name in before if ".visual." in name}
    assert seeing and all(bool((before[name] == after[name]).all()) for name in seeing)
    assert checkpoints.verify(tmp_path / "v1").policy_version == 1
    layout = json.loads((tmp_path / "v1" / "trainer" / "layout.json").read_text())["tensors"]
    assert not any(".visual." in name for name in layout)
    # The engine loads it in place, for it is the same model.
    old, new = (inspect(tmp_path / one) for one in ("model", "v1/model"))
    assert old.signature == new.signature and new.config["architectures"] == old.config["architectures"]
    for name in ("preprocessor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_bytes() == (tmp_path / "v1" / "model" / name).read_bytes()
    processor = tmp_path / "model" / "preprocessor_config.json"
    there = processor.read_text()
    larger = {"shortest_edge": 128 * 128, "longest_edge": 512 * 512}
    processor.write_text(json.dumps({**json.loads(there), "size": larger}))
    said = r"places for images of \[4\b.*\] tokens, and its images have \[16\b.*; trainer and engine process images differently"
    with pytest.raises(ProgramFailed, match=said):
        work.update("v2")
    processor.write_text(there)
    (first, *_) = sorted(folder.iterdir())
    first.write_bytes(first.read_bytes() + b"?")
    with pytest.raises(ProgramFailed, match="is not the image that the policy saw"):
        work.update("v2")


@pytest.mark.torch
def test_a_model_whose_images_have_other_tokens_around_them_is_refused_before_the_start(
    tmp_path: Path,
) -> None:
    """InternVL's processor puts them there itself, so what the engine expands once cannot be sent to it again."""
    from transformers import InternVLConfig

    from fsbarrier.training.vision_inputs import blindness

    known = vision_model(tmp_path / "model").config.to_dict()
    assert blindness(tmp_path / "model", known) == ""
    folder = tmp_path / "intern"
    shutil.copytree(tmp_path / "model", folder)
    pad, begin, end = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
    own = {"context_image_token": pad, "start_image_token": begin, "end_image_token": end}
    config = InternVLConfig(image_token_id=known["image_token_id"])
    config.save_pretrained(folder)
    for name, changes in (
        ("tokenizer_config", {"extra_special_tokens": {**own, "video_token": "<|video_pad|>"}}),
        (
            "preprocessor_config",
            {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 64, "width": 64}},
        ),
        ("video_preprocessor_config", {"video_processor_type": "InternVLVideoProcessor"}),
        ("processor_config", {"processor_class": "InternVLProcessor", "image_seq_length": 4}),
    ):
        file = folder / f"{name}.json"
        there = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**there, "processor_class": "InternVLProcessor", **changes}))
    blind = blindness(folder, config.to_dict())
    assert blind == f"its processor puts other tokens than {pad} in the place of an image"
    assert blindness(folder, {"vision_config": {}}).startswith("no token stands for an image")
    shown = {"role": "user", "content": [{"type": "image", "image": "a.png"}]}
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": [shown], "answer": "b"}) + "\n")
    with pytest.raises(
        UsageError, match=rf"line 1: has an image, which the model {folder} cannot be given: its"
    ):
        read_tasks(tmp_path, {"train": None}, resolve([], {}), model=folder, blind=blind)
    (tmp_path / "a.png").write_bytes(base64.b64decode(STAND_IN.partition(",")[2]))
    (folder / "chat_template.jinja").write_text("{% for one in messages %}{{ one.role }}{% endfor %}")
    said = rf"leaves no place \({re.escape(pad)}\) for each of its 1 images"
    with pytest.raises(UsageError, match=said):
        read_tasks(tmp_path, {"train": None}, resolve([], {}), model=folder)


@pytest.mark.torch
@pytest.mark.slow
def test_the_vision_tower_is_trained_too_if_it_is_not_frozen(tmp_path: Path) -> None:
    looked(tmp_path)
    work = Bench(tmp_path, settings(trainer__freeze="none"))
    work.prepare()
    assert work.update("v1")["logprob_gap_max"] < 1e-4
    before, after = first_weights(tmp_path), work.weights("v1")
    moved = {name for name in before if bool((before[name] != after[name]).any())}
    assert any(".visual." in name for name in moved)
    work.nested["algorithm"]["max_logprob_gap"] = 100.0
    assert work.update("v2", version=2, before="v1")["optimizer_steps"] > 1


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("freeze", ["vision", "none"])
def test_sharded_over_processes_of_which_some_have_no_images(tmp_path: Path, freeze: str) -> None:
    """One sequence a micro-batch: in most rounds only one of the two processes runs the vision tower for something."""
    looked(tmp_path)
    chosen = {"trainer__freeze": freeze, "trainer__max_tokens_per_micro_batch": 1}
    work = Bench(tmp_path, settings(**chosen))
    work.prepare()
    work.update("alone")
    work.nested["trainer"]["shard"] = "all"
    ((process, said),) = work.torchrun(work.update_spec("two"), processes=2)
    assert process.returncode == 0, said
    result = json.loads((tmp_path / "two.result").read_text())
    assert result["distributed"] == "sharded over 2 processes (float32)"
    assert result["logprob_gap_max"] < 1e-4
    # Adam divides by a gradient's own size: where that is rounding, steps may differ.
    alone, two, first = work.weights("alone"), work.weights("two"), first_weights(tmp_path)
    for name, weight in alone.items():
        moved = float((weight - first[name]).norm())
        assert float((weight - two[name]).norm()) <= 0.02 * moved + 1e-7, name


@pytest.mark.torch
@pytest.mark.slow
def test_adapters_are_put_into_the_language_model_alone(tmp_path: Path) -> None:
    looked(tmp_path)
    work = Bench(tmp_path, settings(lora__rank=4))
    work.prepare()
    assert work.update("v1")["logprob_gap_max"] < 1e-4
    before, after = first_weights(tmp_path), work.weights("v1")
    moved = {name for name in before if bool((before[name] != after[name]).any())}
    assert moved and all("language_model.layers" in name for name in moved)


@pytest.mark.torch
@pytest.mark.slow
def test_a_family_whose_class_for_text_would_lose_its_vision_encoder_is_published_whole(
    tmp_path: Path,
) -> None:
    """Qwen3.5: as a causal model it has neither the vision tower nor the configuration that the engine wants."""
    model = seeing_model("qwen3_5").eval()
    write_seeing_model(model, tmp_path / "model")
    ask = masked(model)
    rollouts(tmp_path / "merged", lambda tokens: ask(input_ids=tokens), vocabulary=250)
    work = Bench(tmp_path, settings())
    work.prepare()
    assert work.update("v1")["logprob_gap_max"] < 1e-4
    before, after = first_weights(tmp_path), work.weights("v1")
    moved = {name for name in before if bool((before[name] != after[name]).any())}
    assert before.keys() == after.keys() and moved and not any(".visual." in name for name in moved)
    assert inspect(tmp_path / "model").signature == inspect(tmp_path / "v1" / "model").signature


# --- the real engine ------------------------------------------------------------------------------------------------------------

sys.path.insert(0, str(REPO / "scripts"))


AGENT = REPO / "tests" / "programs" / "looking_agent.py"


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl", "qwen2_5_vl", "llava"])
def test_what_is_recorded_is_what_the_model_saw(tmp_path: Path, family: str) -> None:
    """One answer to a task's image, and an agent that shows three in three turns; then with other weights in the same engine, and those
    that an update of the agent's episodes made."""
    import torch
    from picture_model import draw

    # With a head that is the embedding, as the small models of the family have it.
    model = (
        vision_model(tmp_path / "model", tied=True) if family == "qwen3_vl" else seeing_model(family).eval()
    )
    for number in range(3):
        draw(random.Random(number), "r", number + 1).save(tmp_path / f"{number}.png")
    prompts = [
        [
            {"role": "system", "content": "Look."},
            {
                "role": "user",
                "content": [{"type": "image", "image": f"{n}.png"}, {"type": "text", "text": "what?"}],
            },
        ]
        for n in range(3)
    ]
    chosen = {"engine.max_model_len": 512, "rollout.max_tokens": 20, "rollout.samples": 4}
    resolved = resolve([], chosen, cross_checks=False)
    engine = Engine(resolved.engine, log_file=tmp_path / "vllm.log", work_dir=tmp_path / "work", threads=1)
    found: list[tuple[Path, Path]] = []
    try:
        looks = {"rollout.agent": f"{AGENT}:Looks"}
        for version, agent in enumerate(({}, looks, looks)):
            folder, weights = tmp_path / f"run{version}", tmp_path / f"model{version}"
            if version < 2:
                with torch.no_grad():
                    for one in model.parameters():
                        one.add_(0.02 * torch.randn_like(one))
                write_seeing_model(model, weights)
            else:
                weights = updated(tmp_path, *found[-1])
            info = engine.ensure(weights, version, cancel=threading.Event())
            # The second time the engine, which has seen the tasks' images, loads other weights.
            assert info.action == ("reloaded" if version else "started"), info.note
            served = [{"url": info.url, "api_key": info.api_key, "model": info.model}]
            folder.mkdir()
            for number in range(3):
                (folder / f"{number}.png").write_bytes((tmp_path / f"{number}.png").read_bytes())
            tasks = [{"prompt": prompt, "answer": "x"} for prompt in prompts]
            sampling = {"samples": 4, "max_tokens": 20}
            texts = ["x"] * len(prompts)
            own = {"engine": served, "model": str(weights), "policy_version": version, "sampling": sampling}
            spec = make_spec(folder, info.url, texts, **own, **chosen, **agent)
            (folder / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
            done = run(spec)
            assert (done.code, done.stderr) == (0, ""), done.stderr
            found.append((folder, weights))
    finally:
        engine.stop()
    for folder, weights in found:
        trajectories = [one for group in rolled_out(folder).values() for one in group]
        turns = 1 if folder.name == "run0" else 3
        assert [one["turns"] for one in trajectories if "turns" in one] == [3] * 12 * (turns == 3)
        for one in trajectories:
            check(folder / "trajectories" / "train_images.iteration5", weights, one, images=turns)


def updated(tmp_path: Path, folder: Path, weights: Path) -> Path:
    """The model that an update makes of these rollouts of policy version 1."""
    (tmp_path / "merged").hardlink_to(folder / "trajectories" / "checkpoint")
    (tmp_path / "train_images.iteration5").symlink_to(folder / "trajectories" / "train_images.iteration5")
    bench = Bench(tmp_path, settings())
    assert bench.prepare(policy_version=1, run_id="run", model=str(weights))["trajectories"] > 0
    result = bench.update("v2", version=2, trainer_state=None, model=str(weights))
    assert result["optimizer_steps"] > 0 and result["logprob_gap_max"] < 1e-3
    return tmp_path / "v2" / "model"


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_judge_beside_the_policy_sees_the_images(tmp_path: Path) -> None:
    """What it says of a file is what transformers' model says of it."""
    import torch
    from picture_model import draw
    from PIL import Image
    from transformers import AutoProcessor

    model = vision_model(tmp_path / "model")
    paths = [str(tmp_path / f"{number}.png") for number in range(2)]
    for number, path in enumerate(paths):
        draw(random.Random(number), "rg"[number], 3 * number + 1).save(path)
    replicas = Replicas(
        FrozenEngineSettings(max_model_len=512, dtype="float32"),
        log_dir=tmp_path / "logs",
        work_dir=tmp_path / "work",
        frozen="wise",
    )
    engine = FrozenEngine(replicas, LOOPBACK)
    content = [[{"type": "image", "image": path}, {"type": "text", "text": "what?"}] for path in paths]

    async def ask() -> list[str]:
        judge = Judge(JudgeSettings(model="engines.wise"), 300.0, engine.address)
        try:
            return [
                await judge.ask([{"role": "user", "content": one}], max_tokens=30, ignore_eos=True)
                for one in content
            ]
        finally:
            await judge.close()

    try:
        engine.ensure(tmp_path / "model", None, threads=1, cancel=threading.Event())
        said = asyncio.run(ask())
    finally:
        engine.stop()
    processor = AutoProcessor.from_pretrained(tmp_path / "model")
    for one, path, words in zip(content, paths, said, strict=True):
        text = processor.apply_chat_template([{"role": "user", "content": one}], add_generation_prompt=True)
        inputs = processor(text=[text], images=[Image.open(path)], return_tensors="pt")
        with torch.no_grad():
            out = model.generate(**inputs, max_new_tokens=30, min_new_tokens=30, do_sample=False)
        expected = processor.tokenizer.decode(
            out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        # vLLM leaves out the beginning of a letter at the end.
        assert words.rstrip("\ufffd") == expected.rstrip("\ufffd")
    assert said[0] != said[1]


def check(folder: Path, weights: Path, trajectory: dict[str, Any], *, images: int) -> None:
    """Its tokens are those of transformers' own processor, and its log-probabilities those of transformers' model."""
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(weights)
    model = AutoModelForImageTextToText.from_pretrained(weights)
    (names,) = trajectory["images"]
    assert len(names) == images
    messages = json.loads(json.dumps(trajectory["messages"]))
    parts = [
        part for message in messages if isinstance(message["content"], list) for part in message["content"]
    ]
    assert [part["image"] for part in parts if part["type"] == "image"] == names
    text = processor.apply_chat_template(messages, tokenize=False)
    seen = [Image.open(folder / name) for name in names]
    given = processor(text=[text], images=seen, return_tensors="pt")
    ids = torch.tensor([list(trajectory["token_ids"])])
    # The first prompt token by token; afterwards answers are what was sampled, which no text says.
    prompt = trajectory["prompt_tokens"]
    assert ids[0, :prompt].tolist() == given["input_ids"][0, :prompt].tolist()
    placeholder = model.config.image_token_id
    assert (ids == placeholder).sum() == (given["input_ids"] == placeholder).sum()
    kinds = {name: (ids == placeholder).long() for name in given if name.endswith("token_type_ids")}
    pixels = {name: given[name] for name in ("pixel_values", "image_grid_thw") if name in given}
    with torch.no_grad():
        logits = model(input_ids=ids, **pixels, **kinds).logits[0, :-1]
    logits[:, placeholder_ids(model.config.to_dict())] = -torch.inf
    own = torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0]
    sampled = torch.tensor(list(trajectory["loss_mask"]), dtype=torch.bool)[1:]
    told = torch.tensor(list(trajectory["logprobs"]))[1:]
    assert float((own - told)[sampled].abs().max()) < 1e-3


@pytest.mark.engine
@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("task", ["pictures", "blind"])
def test_a_policy_learns_from_what_it_sees_and_from_nothing_else(tmp_path: Path, task: str) -> None:
    """scripts/learning_curve.py, with one seed on one node."""
    import subprocess

    words = ["--task", task, "--seeds", "0", "--nodes", "1", "--out", str(tmp_path)]
    curve = [sys.executable, str(REPO / "scripts" / "learning_curve.py"), *words]
    done = subprocess.run(curve, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
