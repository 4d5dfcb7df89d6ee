"""Validation's estimate against the decoder itself, on a trained drafter and the target's own answers."""

import json
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import CONFIGS, save_tokenizer
from transformers import AutoModelForCausalLM

from dflash_cache.cache.reader import Batch
from dflash_cache.config.loading import validate_config
from dflash_cache.config.settings import Config, EvalSettings, ObjectiveSettings
from dflash_cache.data.held_out import split_rows
from dflash_cache.decode.choice import Greedy
from dflash_cache.decode.evaluate import Evaluation, answer_plainly, evaluate
from dflash_cache.decode.prompts import Question
from dflash_cache.decode.speculate import Limits, decode_plainly, decode_speculatively
from dflash_cache.drafter.anchors import draw_anchors, pad_anchors
from dflash_cache.drafter.frozen import FrozenTarget, load_frozen
from dflash_cache.drafter.weights import TargetFiles
from dflash_cache.target.generate import generate
from dflash_cache.target.load import Target, load_target
from dflash_cache.target.observer import Observer
from dflash_cache.train.checkpoint import latest_path, load_drafter
from dflash_cache.train.forward import DraftPass, draft_loss, draft_streaks
from dflash_cache.train.loop import train
from dflash_cache.train.metrics import Record
from dflash_cache.train.setup import open_reader
from dflash_cache.train.stream import MicroBatch
from dflash_cache.train.walk import AnswerWalks

MASK_TOKEN = 127
MAX_NEW = 64
LENGTH = 48  # tokens of a turn
NUM_STOPS = 6  # enough that about half of the answers end by themselves


@dataclass(frozen=True)
class Trained:
    """A complete run: its last validation, its target, and its held-out samples (ids, and where the answer begins)."""

    config: Config
    validation: Record
    target: Target
    held_out: list[tuple[list[int], int]]

    @property
    def drafter(self) -> Any:
        path = latest_path(Path(self.config.run_dir))
        assert path is not None
        return load_drafter(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A tiny Llama answers 160 prompts; a drafter learns three quarters of the answers, with few anchors of each."""
    folder = tmp_path_factory.mktemp("estimate")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), dtype=torch.float32)
        prompts_SP = torch.randint(7, 120, (160, 8)).tolist()
    model.lm_head.weight.data[MASK_TOKEN] = 0.0  # never the highest logit: the data must not hold the mask token
    model.generation_config.eos_token_id = [*range(2, 2 + NUM_STOPS)]
    model.save_pretrained(folder / "target")
    save_tokenizer(folder / "target")
    words = [" ".join(f"w{word - 7}" for word in prompt[: 2 + i % 7]) for i, prompt in enumerate(prompts_SP)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": text}) for text in words) + "\n")
    config = validate_config(
        {
            "cache_dir": str(folder / "cache"),
            "run_dir": str(folder / "run"),
            "target": {
                "model": str(folder / "target"), "dtype": "float32", "device": "cpu", "layer_ids": [0, 2, 4]
            },
            "data": {"paths": [str(folder / "prompts.jsonl")], "max_length": 128, "num_buckets": 2,
                     "min_answer_tokens": 1},
            "respond": {"enabled": True, "max_new_tokens": MAX_NEW},
            "drafter": {"num_layers": 1, "block_size": 6, "mask_token_id": MASK_TOKEN, "init": "target-layers"},
            "train": {"epochs": 16, "token_budget": 1024, "accumulation": 2, "anchors_per_sample": 16,
                      "validation_share": 0.25, "learning_rate": 4e-3, "dtype": "float32", "device": "cpu"},
        },
        "test",
    )  # fmt: skip
    generate(config, Observer())
    records: list[Record] = []
    assert train(config, [records.append])
    with open_reader(config) as reader:
        _, rows = split_rows(reader.index.sample, config.train.validation_share, config.train.seed)
        batches = [reader.read_batch(rows[i : i + 1]) for i in range(len(rows))]
    held_out = [
        (batch.input_ids[0, : int(batch.length)].tolist(), int(batch.loss_mask[0].long().argmax())) for batch in batches
    ]
    return Trained(config, records[-1], load_target(config.target), held_out)


@pytest.fixture(scope="module")
def decoded(trained: Trained) -> Evaluation:
    """The held-out prompts, decoded."""
    settings = EvalSettings(max_new_tokens=MAX_NEW, batch_size=10)
    questions = [Question(ids[:begin], "held out", i) for i, (ids, begin) in enumerate(trained.held_out)]
    plain = answer_plainly(trained.target, questions, settings, lambda _: None)
    assert [one.tokens for one in plain] == [ids[begin:] for ids, begin in trained.held_out], "the target's own answers"
    return evaluate(trained.target, trained.drafter, questions, plain, settings, lambda _: None)


def test_validation_estimates_what_decoding_its_samples_yields_within_one_per_cent(
    trained: Trained, decoded: Evaluation
) -> None:
    found, overall = trained.validation, decoded.overall
    assert overall.lossless
    assert overall.tokens_per_pass > 1.2, "right drafts, or this tests nothing"
    passes = sum(overall.histogram.values())
    assert passes > 500
    assert found["passes"] == pytest.approx(passes, rel=0.001)
    assert found["acceptance_estimate"] == pytest.approx(overall.tokens_per_pass, rel=0.001)
    assert found["answer_acceptance_estimate"] == pytest.approx(overall.acceptance_length, rel=0.01)
    assert found["position_acceptance"] == pytest.approx(overall.position_acceptance, abs=0.01)


def test_a_mean_over_anchors_drawn_evenly_is_far_above_what_decoding_yields(
    trained: Trained, decoded: Evaluation
) -> None:
    assert trained.validation["anchor_acceptance"] > 1.1 * decoded.overall.tokens_per_pass


def test_every_turn_of_a_conversation_is_walked_as_the_decoder_goes_through_it(trained: Trained) -> None:
    """By a drafter that has learned the conversation in part; its turns would go on, so that blocks are whole."""
    target, drafter = trained.target, trained.drafter
    ids, mask, prompts = converse(target, ([9, 11, 40], [50, 51], [7, 80, 33, 12, 60]))
    frozen = load_frozen(
        TargetFiles(trained.config.target), drafter.shape.embedding_scale, torch.float32, target.device
    )
    micro_batch = read_states(target, ids, mask)
    learn_by_heart(DraftPass(drafter), frozen, micro_batch)
    limits = Limits(LENGTH + drafter.shape.block_size, frozenset())
    expected = []
    for prompt in prompts:
        (turn,) = decode_speculatively(target, [prompt], limits, Greedy(), drafter.eval())
        assert turn.tokens[:LENGTH] == ids[len(prompt) : len(prompt) + LENGTH]
        ends = [min(end, LENGTH - 1) for end in (0, *accumulate(turn.accepted))]  # the first token is the prefill's
        expected.append([end - begin for begin, end in pairwise(ends) if end > begin])
    assert all({1, 2, 3} <= {*turn} for turn in expected), "right and wrong drafts in every turn"
    for count in (1, 7, 1000):
        walks = AnswerWalks(np.array([mask]))
        while (wanted := walks.next_anchors(count)) is not None:
            anchors_SA = pad_anchors(wanted)
            streaks_SA = draft_streaks(DraftPass(drafter), frozen, micro_batch, anchors_SA)
            walks.learn(anchors_SA.numpy(), streaks_SA[anchors_SA >= 0].numpy())
        assert walks.yields == expected


def converse(target: Target, questions: tuple[list[int], ...]) -> tuple[list[int], list[bool], list[list[int]]]:
    """Ids and loss mask of a conversation in which the target answers in LENGTH tokens; what stands before each answer.

    The answers end before anything ends them.
    """
    ids: list[int] = []
    mask: list[bool] = []
    prompts = []
    for question in questions:
        prompts.append(ids + question)
        (answer,) = decode_plainly(target, [prompts[-1]], Limits(LENGTH, frozenset()), Greedy())
        ids, mask = prompts[-1] + answer.tokens, mask + [False] * len(question) + [True] * LENGTH
    return ids, mask, prompts


def read_states(target: Target, ids: list[int], mask: list[bool]) -> MicroBatch:
    """The sample with every anchor, as its one unbatched forward gives its states."""
    with torch.no_grad():
        every = target.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    states_STLH = torch.stack([every[k + 1] for k in target.layer_ids], dim=2)
    length = torch.tensor([len(ids)])
    batch = Batch(torch.zeros(1).long(), length, torch.tensor([ids]), torch.tensor([mask]), states_STLH)
    return MicroBatch(batch, pad_anchors([draw_anchors(np.array(mask), len(ids), (0, 0, 0))]), bucket=0)


def learn_by_heart(draft: DraftPass, frozen: FrozenTarget, micro_batch: MicroBatch) -> None:
    """A few steps on the sample."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3)
    for _ in range(60):
        loss = draft_loss(draft, frozen, micro_batch, ObjectiveSettings())
        (loss.loss_sum / loss.weight_sum).backward()
        optimizer.step()
        optimizer.zero_grad()
