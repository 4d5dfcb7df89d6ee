"""A cache from which bad samples were left out is finished for all commands, and none hides them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dflash_cache.target import pipeline


def test_a_cache_without_its_bad_samples_trains_and_says_so(
    dflash, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture = pipeline.capture_states

    def spoiled(target: Any, ids_ST: Any, lengths_S: Any, out_STLH: Any = None) -> Any:
        states = capture(target, ids_ST, lengths_S, out_STLH)
        states[(ids_ST[:, 2] == 7 + 20).nonzero(), 0] = float("nan")  # word 20 has id 27
        return states

    monkeypatch.setattr(pipeline, "capture_states", spoiled)
    refused = dflash("generate", project)
    assert refused.code == 2
    assert "bad states for 1 of 60 samples, more than generate.max_bad_share (0.01)" in refused.err
    outcome = dflash("generate", project, "--set", "generate.max_bad_share=0.05")
    assert outcome.code == 0, outcome.err
    shown = " ".join(outcome.out.split())
    assert "Left out 1 bad samples (first: sample 20, " in shown
    assert "data.jsonl:21): states that are not finite." in shown
    assert "is complete: 60 samples, 1 of them bad and left out." in shown
    report = json.loads(dflash("inspect-buckets", project.parent / "cache", "--json").out)
    assert (report["cached_samples"], report["num_samples"]) == (59, 60)
    assert report["rejected"] == {"states that are not finite": 1}
    assert (
        "1 samples were left out: states that are not finite."
        in dflash("inspect-buckets", project.parent / "cache").out
    )
    trained = dflash("train", project, "--set", "train.max_steps=1")
    assert trained.code == 0, trained.err
