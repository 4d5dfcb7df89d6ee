"""What `dflash train` shows of the mix, against the JSONL file's record of the same step."""

import json

from dflash_cli.train import show_mix

IN_EVERY_RECORD = {"micro_batches", "padding_efficiency", "mean_length", "max_length", "kl", "longest_run",
                   "buffer_fill", "ready"}  # fmt: skip

OF_A_BUCKET = ("loss", "accuracy", "acceptance")


def test_every_step_is_logged_whole_and_every_so_many_th_is_shown_with_how_it_was_mixed(dflash, project) -> None:
    assert dflash("generate", project).code == 0
    trained = dflash("train", project, "--set", "train.max_steps=4")
    assert trained.code == 0, trained.err
    lines = (project.parent / "run" / "log.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == "train"]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    per_bucket = {f"bucket_{b}_{name}" for b in range(3) for name in ("pct", "running_pct", *OF_A_BUCKET)}
    for record in records:
        assert record["batch"].keys() == IN_EVERY_RECORD | per_bucket
    shown = [line.strip() for line in trained.out.splitlines() if line.startswith("  mix ")]
    assert shown == [show_mix(record["batch"]) for record in records if record["step"] % 2 == 0]


def test_the_line_of_a_step_is_the_one_written_by_hand() -> None:
    batch = {
        "bucket_0_pct": 25.0, "bucket_1_pct": 75.0, "bucket_0_running_pct": 30.4, "bucket_1_running_pct": 69.6,
        "bucket_0_loss": None, "bucket_1_loss": 2.345, "bucket_0_accuracy": None, "bucket_1_accuracy": 0.5,
        "kl": 0.0123, "longest_run": 3, "padding_efficiency": 0.953, "mean_length": 310.4, "max_length": 512,
        "buffer_fill": 10.2, "ready": 4,
    }  # fmt: skip
    assert show_mix(batch) == (
        "mix 25/75 % (so far 30/70 %; KL 0.012)  run 3  95 % real  length 310, 512 max  buffer 10, 4 ready  "
        "by bucket: loss –/2.35, accuracy –/50%"
    )
