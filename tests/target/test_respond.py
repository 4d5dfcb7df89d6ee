import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dflash_cache.config.settings import RespondSettings, TargetSettings
from dflash_cache.errors import CacheError
from dflash_cache.target.load import Target, load_target, stop_tokens
from dflash_cache.target.respond import choose_tokens, plan_batches, respond

GREEDY = RespondSettings(max_new_tokens=24, batch_size=4)
SAMPLED = RespondSettings(max_new_tokens=24, batch_size=4, temperature=1.0, top_p=0.9, seed=5)
KILLED = """
import json, os, sys
from pathlib import Path
from dflash_cache.config.settings import RespondSettings, TargetSettings
from dflash_cache.target.load import load_target
from dflash_cache.target.respond import respond
target_folder, folder, settings, prompts = sys.argv[1:]
target = load_target(TargetSettings(model=target_folder, dtype="float32", device="cpu", layer_ids=(0, 2, 4)))
kill = lambda done, total, new_tokens: os.kill(os.getpid(), 9) if done >= 8 else None
respond(target, json.loads(prompts), RespondSettings.model_validate_json(settings), Path(folder), kill)
"""


def draw_prompts(count: int = 14) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    return [torch.randint(4, 128, (length,), generator=generator).tolist() for length in lengths]


def ignore(done: int, total: int, new_tokens: int) -> None:
    pass


def answer_alone(target: Target, prompt: list[int], max_new_tokens: int) -> list[int]:
    """The slow reference: no batch, no padding, no cache."""
    ids = list(prompt)
    while len(ids) - len(prompt) < max_new_tokens:
        with torch.inference_mode():
            ids.append(int(target.model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        if ids[-1] in stop_tokens(target):
            break
    return ids[len(prompt) :]


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(CacheError) as caught:
        action()
    return str(caught.value)


@pytest.fixture
def stopping(llama_folder: Path) -> Target:
    """The tiny Llama with many stop tokens, so that rows of a batch end at different times."""
    target = load_target(TargetSettings(model=str(llama_folder), dtype="float32", device="cpu", layer_ids=(0, 2, 4)))
    target.model.generation_config.eos_token_id = list(range(2, 12))  # type: ignore[union-attr]
    return target


def test_greedy_answers_equal_a_plain_loop_over_single_prompts(stopping: Target, tmp_path: Path) -> None:
    prompts = draw_prompts()
    answers = respond(stopping, prompts, GREEDY, tmp_path, ignore)
    assert answers == [answer_alone(stopping, prompt, 24) for prompt in prompts]
    assert len({len(answer) for answer in answers}) > 3  # they did end at different times


def test_every_family_answers_as_it_does_alone(family_folder: Path, tmp_path: Path) -> None:
    target = load_target(TargetSettings(model=str(family_folder), dtype="float32", device="cpu", num_layers=1))
    prompts = draw_prompts(6)
    answers = respond(target, prompts, GREEDY, tmp_path, ignore)
    assert answers == [answer_alone(target, prompt, 24) for prompt in prompts]


def test_an_answer_ends_with_its_stop_token_or_at_the_limit(stopping: Target, tmp_path: Path) -> None:
    stops = stop_tokens(stopping)
    for answer in respond(stopping, draw_prompts(), SAMPLED, tmp_path, ignore):
        assert not stops.intersection(answer[:-1])
        assert answer[-1] in stops or len(answer) == 24


def test_batches_hold_each_prompt_once_shortest_first() -> None:
    assert plan_batches([[1] * 3, [1], [1] * 2, [1], [1] * 9], 2) == [[1, 3], [2, 0], [4]]


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_killed_run_goes_on_with_the_same_answers_and_redoes_nothing(
    llama: Target, llama_folder: Path, tmp_path: Path, settings: RespondSettings
) -> None:
    prompts = draw_prompts()
    arguments = [str(llama_folder), str(tmp_path / "killed"), settings.model_dump_json(), json.dumps(prompts)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    result = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, env=environment)
    assert result.returncode == -9
    finished = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "killed").glob("batch-*.parquet")}
    assert sorted(finished) == ["batch-000000.parquet", "batch-000001.parquet"]

    told: list[tuple[int, int, int]] = []
    answers = respond(llama, prompts, settings, tmp_path / "killed", lambda *numbers: told.append(numbers))
    assert answers == respond(llama, prompts, settings, tmp_path / "whole", ignore)
    assert [numbers[:2] for numbers in told] == [(0, 14), (4, 14), (8, 14), (12, 14), (14, 14)]
    assert told[1][2] == 0
    redone = [place for members in plan_batches(prompts, 4)[2:] for place in members]
    assert told[-1][2] == sum(len(answers[place]) for place in redone)
    assert {name: (tmp_path / "killed" / name).stat().st_mtime_ns for name in finished} == finished


def test_one_seed_gives_one_set_of_answers_and_another_seed_another(llama: Target, tmp_path: Path) -> None:
    prompts = draw_prompts()
    other = SAMPLED.model_copy(update={"seed": 6})
    first = respond(llama, prompts, SAMPLED, tmp_path / "a", ignore)
    assert first == respond(llama, prompts, SAMPLED, tmp_path / "b", ignore)
    assert first != respond(llama, prompts, other, tmp_path / "c", ignore)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8), (1.0, 0.3)])
def test_sampling_follows_the_softmax_cut_at_top_p(temperature: float, top_p: float) -> None:
    num_draws = 40_000
    logits_V = torch.tensor([0.5, 2.0, -1.0, 1.5, 0.0, 1.0])
    settings = RespondSettings(temperature=temperature, top_p=top_p)
    tokens = choose_tokens(logits_V.expand(num_draws, -1), settings, torch.Generator().manual_seed(0))

    by_probability = sorted(enumerate((logits_V / temperature).softmax(-1).tolist()), key=lambda pair: -pair[1])
    kept: dict[int, float] = {}
    for token, probability in by_probability:
        if sum(kept.values()) < top_p:
            kept[token] = probability
    expected = [kept.get(token, 0.0) / sum(kept.values()) for token in range(6)]
    for token, share in enumerate(expected):
        drawn = int((tokens == token).sum()) / num_draws
        assert abs(drawn - share) <= 4.5 * (share * (1 - share) / num_draws) ** 0.5


def test_other_settings_are_refused_by_name(llama: Target, tmp_path: Path) -> None:
    prompts = draw_prompts()
    respond(llama, prompts, GREEDY, tmp_path, ignore)
    other = GREEDY.model_copy(update={"temperature": 0.7, "batch_size": 8})
    assert refusal(lambda: respond(llama, prompts, other, tmp_path, ignore)) == (
        f"The answers in {tmp_path} belong to something else (temperature: was 0.0, is 0.7; batch_size: was 4, is 8): "
        "undo the change, name another cache_dir, or delete that folder to make the answers anew."
    )


def test_other_prompts_are_refused_even_where_their_ids_run_on_equally(llama: Target, tmp_path: Path) -> None:
    respond(llama, [[5, 6], [7]], GREEDY, tmp_path, ignore)
    message = refusal(lambda: respond(llama, [[5], [6, 7]], GREEDY, tmp_path, ignore))
    assert message.startswith(f"The answers in {tmp_path} belong to something else (prompts: was ")


def test_no_prompts_need_no_answers(llama: Target, tmp_path: Path) -> None:
    assert respond(llama, [], GREEDY, tmp_path, ignore) == []


def test_a_damaged_batch_is_named(llama: Target, tmp_path: Path) -> None:
    prompts = draw_prompts()
    respond(llama, prompts, GREEDY, tmp_path, ignore)
    path = tmp_path / "batch-000001.parquet"
    path.write_bytes(path.read_bytes()[:100])
    message = refusal(lambda: respond(llama, prompts, GREEDY, tmp_path, ignore))
    assert message.startswith(f"The answers {path} are damaged (")
    assert message.endswith("): delete that file and run the same command again, which makes them anew.")
    path.unlink()
    assert len(respond(llama, prompts, GREEDY, tmp_path, ignore)) == len(prompts)


def test_a_damaged_plan_is_named(llama: Target, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[]")
    assert refusal(lambda: respond(llama, [[5]], GREEDY, tmp_path, ignore)) == (
        f"The answers' plan {tmp_path / 'plan.json'} cannot be read (no JSON object): delete the folder {tmp_path} "
        "to make the answers anew."
    )
