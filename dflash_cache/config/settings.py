"""The whole configuration, typed: one tree of frozen settings for all commands, and the only home of defaults.

Unknown keys are refused (see `loading`, which names the nearest known one). A setting's comment says what it
means and its unit; where the default comes from a paper or a peer, FIELD.md's source is named.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from dflash_cache.config.dtypes import CodecOrNone, ComputeDtype, Dtype, DtypeOrAuto
from dflash_cache.config.section import (
    Decay,
    DeviceList,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Settings,
    Share,
)


class TargetSettings(Settings):
    """The frozen model whose decoding is to be sped up."""

    model: str = Field(description="folder of a transformers checkpoint, or a model's name on the Hub")
    revision: str | None = Field(None, description="revision on the Hub; null: the default one")
    trust_remote_code: bool = Field(
        False, description="run the Python code that comes with the checkpoint; only for a source that you trust"
    )
    allow_pickle: bool = Field(
        False, description="take weights from pytorch_model.bin where there are no safetensors (only tensors are read)"
    )
    dtype: DtypeOrAuto = Field(
        "bfloat16", description="dtype of the forward pass and the cached states; auto: the faster"
    )
    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:1, …")
    device_map: str | None = Field(
        None,
        description="auto, balanced, …: spread a target too large for one device over all of them (transformers' "
        "device_map; needs accelerate); one worker then drives the group. Not yet seen on GPUs",
    )
    max_memory: dict[int | str, str] | None = Field(
        None,
        description="room for a device_map's weights, as {0: 60GiB, cpu: 200GiB}; null: nearly all there is. What fits "
        "nowhere is read from the checkpoint for every forward: slow",
    )
    layer_ids: tuple[NonNegativeInt, ...] | None = Field(
        None,
        min_length=1,
        description="decoder layers to cache the outputs of, counted from 0; null: spread over the depth (z-lab)",
    )
    num_layers: PositiveInt = Field(5, description="how many layers that rule picks")
    store_last_hidden: bool = Field(
        False, description="cache the last layer's output as well, for objective.distill; one layer more to store"
    )

    @field_validator("layer_ids")
    @classmethod
    def _layers_ascend(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and list(value) != sorted(set(value)):
            raise ValueError("must be ascending, without repeats")
        return value


class DataSettings(Settings):
    """Which conversations are cached, and how they become samples."""

    paths: tuple[str, ...] = Field(
        min_length=1,
        description="JSONL, JSON or parquet files, folders or globs of these, or hub:owner/name[/subset][:split]",
    )
    max_length: PositiveInt = Field(2048, description="tokens; a longer sample is handled as `overlong` says")
    overlong: Literal["drop", "cut-turn", "truncate"] = Field(
        "drop",
        description="drop the sample; cut-turn: leave out its last turns until it ends with a whole answer; truncate: "
        "cut its end off wherever that is",
    )
    train_on: Literal["all-assistant", "last-assistant"] = Field(
        "all-assistant", description="which answers of a conversation are supervised: all, or the last one"
    )
    drop_duplicates: bool = Field(
        True, description="leave out a conversation that says the same as one before it; what is appended counts anew"
    )
    min_answer_tokens: PositiveInt = Field(2, description="samples with fewer supervised tokens are left out")
    bucket_bounds: tuple[PositiveInt, ...] | None = Field(
        None,
        description="inclusive upper bounds of the lengths, the last is max_length; null: quantiles of the data",
    )
    num_buckets: PositiveInt = Field(6, description="how many buckets the quantiles make")
    strict: bool = Field(False, description="stop at the first malformed record instead of skipping and counting it")

    @model_validator(mode="after")
    def _bounds_ascend(self) -> "DataSettings":
        bounds = self.bucket_bounds
        if bounds is not None:
            if list(bounds) != sorted(set(bounds)):
                raise ValueError("bucket_bounds must be ascending, without repeats")
            if not bounds or bounds[-1] != self.max_length:
                raise ValueError(f"bucket_bounds must end with max_length ({self.max_length})")
        return self


class RespondSettings(Settings):
    """Answers by the target itself for prompts that have none (a drafter must learn the target's own words)."""

    enabled: bool = Field(
        False,
        description="let the target answer prompts without an answer; otherwise they are skipped",
    )
    max_new_tokens: PositiveInt = 256
    temperature: NonNegativeFloat = Field(0.0, description="0 is greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    batch_size: PositiveInt = Field(48, description="prompts answered at once")
    seed: NonNegativeInt = 0


class GenerateSettings(Settings):
    """The target's forward passes and the shards they fill."""

    token_budget: PositiveInt = Field(8192, description="padded tokens of one forward pass")
    codec: CodecOrNone = Field(
        "raw",
        description="how states are stored: none, as they are; int8 or int4, in 8.6 or 4.6 bits a number instead of "
        "16, with a relative error of about 0.005 or 0.1 (cache/codec.py)",
    )
    shard_bytes: PositiveInt = Field(1 << 30, description="a shard is closed when it holds this many bytes")
    shard_seconds: PositiveFloat = Field(600.0, description="or when it has been open for this long")
    order_seed: NonNegativeInt = Field(0, description="seed of the order in which jobs are listed")
    devices: DeviceList | None = Field(
        None, description="one worker a device: all (GPUs), 0,1 (these GPUs), cpu:2; null: one, on target.device"
    )
    buffer_bytes: PositiveInt = Field(
        1 << 30, description="host memory of a worker for states that wait for the disk; at least one job's"
    )
    max_bad_share: Share = Field(
        0.01, description="share of the samples whose states may be bad and left out before the run fails"
    )


class DrafterSettings(Settings):
    """The drafter's shape; what is null comes from the target."""

    num_layers: PositiveInt = 5
    block_size: Annotated[int, Field(ge=2)] = Field(16, description="slots of a block, the anchor's included")
    mask_token_id: NonNegativeInt | None = Field(
        None,
        description="null: chosen from the target's unused or reserved ids",
    )
    intermediate_size: PositiveInt | None = None
    num_attention_heads: PositiveInt | None = None
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    rms_norm_eps: PositiveFloat | None = None
    rope_theta: PositiveFloat | None = Field(None, description="a drafter served with another base than the target's")
    rope_scaling: Literal["target", "none"] = Field(
        "target",
        description="target: its linear, llama3 or plain yarn scaling; none: the plain rope",
    )
    vocab_size: PositiveInt | None = Field(None, description="in the exported config; the embedding is the target's")
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Field(
        None, description="of every layer, as in transformers' configs; null: full_attention"
    )
    sliding_window: PositiveInt | None = Field(
        None, description="positions that a slot of a sliding_attention layer sees, its own included (drafter/sight.py)"
    )
    init: Literal["random", "target-layers", "auto"] = Field(
        "random",
        description="target-layers: start from the target's last layers, `fc` passing the deepest captured one "
        "through; auto: so if they are like the drafter's, else at random",
    )
    init_from: str | None = Field(
        None,
        description="start from an earlier drafter instead: a checkpoint, a run's folder (its best one), or a folder "
        "in z-lab's format; its mask token is kept unless mask_token_id names another",
    )


class ObjectiveSettings(Settings):
    """Position weights and loss terms (DESIGN.md, "The drafter and its objective")."""

    weights: Literal["uniform", "decay", "streak", "dpace"] = "decay"
    gamma: PositiveFloat | None = Field(
        None,
        description="null: by block size for decay (paper, appendix A.1), 10 for streak",
    )
    streak_alpha: Share = 0.5
    dpace_alpha: Share = 0.5
    max_slots: PositiveInt | None = Field(
        None,
        description="slots after the anchor that are trained at all; null: every one. Those beyond cost nothing",
    )
    distill: Share = Field(
        0.0,
        description="share of KL from the target's own distribution, the rest is hard labels' cross-entropy; needs a "
        "cache with target.store_last_hidden",
    )
    cap_lambda: NonNegativeFloat = Field(
        0.0,
        description="weight of the mean entropy of the slots that are right already (CAP, LLaDA 2.0, section 5.2); "
        "above 0 a step makes its forward passes twice",
    )


class NoiseSettings(Settings):
    """Noise on the cached states that training reads; validation never has any."""

    kind: Literal["off", "gaussian", "uniform"] = "off"
    strength: NonNegativeFloat = Field(
        0.05, description="standard deviation, in the states' own units (speculators: 0.05, uniform)"
    )
    warmup_share: Share = Field(0.04, description="share of the steps over which it rises from exactly zero")
    after_warmup: Literal["hold", "decay"] = Field(
        "hold", description="stay at strength, or fall along a line to zero at the last step"
    )

    @model_validator(mode="before")
    @classmethod
    def _off_is_no_truth_value(cls, tree: Any) -> Any:
        # YAML reads a bare `off` as false
        return tree | {"kind": "off"} if isinstance(tree, dict) and tree.get("kind") is False else tree


class TrainSettings(Settings):
    """The training run."""

    epochs: PositiveInt = 6
    max_steps: PositiveInt | None = Field(None, description="stop after this many optimizer steps even inside an epoch")
    token_budget: PositiveInt = Field(8192, description="padded tokens of one micro-batch")
    max_samples: PositiveInt = Field(64, description="samples of one micro-batch at most")
    accumulation: PositiveInt = Field(4, description="micro-batches of one optimizer step on each rank")
    min_buffer: NonNegativeInt = Field(
        10,
        description="ready micro-batches from which the next one is pulled at random",
    )
    anchors_per_sample: PositiveInt = Field(512, description="blocks drawn per sample and epoch at most (paper: 512)")
    validation_share: Annotated[float, Field(ge=0, lt=1)] = Field(0.02, description="share of the samples held out")
    order: Literal["interleaved", "shuffled", "sequential"] = Field(
        "interleaved",
        description="how the epoch's list mixes the buckets; the other two are there for comparison",
    )
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: torch's Muon for matrices, its updates scaled to AdamW's size, and AdamW for norms",
    )
    learning_rate: PositiveFloat = 6e-4
    betas: tuple[Decay, Decay] = Field((0.9, 0.95), description="AdamW's")
    muon_momentum: Decay = Field(0.95, description="Muon's, with Nesterov's step")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="of matrices alone, times the learning rate; norms have none"
    )
    ema_decay: Decay | None = Field(
        None,
        description="of a moving average of the weights, which is then validated, exported and measured; null: none",
    )
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        "cosine",
        description="after the warm-up; wsd (warm-up, stable, decay) stays at the peak until the last decay_share",
    )
    warmup_share: Share = Field(0.04, description="share of the steps over which the rate rises to learning_rate")
    decay_share: Share = Field(0.2, description="wsd: share of the steps, at the end, over which the rate falls")
    final_learning_rate_share: Share = Field(
        0.0, description="cosine and wsd get to this share of learning_rate one step after the last; not of constant"
    )
    clip_norm: PositiveFloat = Field(1.0, description="of the step's whole gradient; its norm before is in the log")
    max_skipped: PositiveInt = Field(
        10, description="steps in a row with a non-finite loss or gradient (each is skipped) before the run stops"
    )
    noise: NoiseSettings = NoiseSettings()
    seed: NonNegativeInt = 0
    dtype: ComputeDtype = Field(
        "bfloat16",
        description="autocast dtype of the drafter's matrix products; master weights are float32; auto: the faster",
    )
    device: str = Field("auto", description="auto (a GPU if there is one), cpu, cuda, cuda:1, …")
    reader_threads: PositiveInt = Field(2, description="threads that read ahead, on each rank")
    read_ahead_bytes: PositiveInt = Field(
        1 << 32,
        description="cached states in memory at most, on each rank: the step in training and what is read ahead of it. "
        "One step always fits, however large",
    )
    verify_checksums: bool = True
    direct_io: bool = Field(False, description="read states past the page cache; for caches larger than memory")
    log_every: PositiveInt = Field(10, description="steps between two console lines; every step is in the JSONL file")
    validate_every: PositiveInt = Field(100, description="steps between two validations")
    checkpoint_every: PositiveInt = Field(200, description="steps between two checkpoints")
    keep_checkpoints: PositiveInt = 2
    max_anchors: PositiveInt | None = Field(
        None,
        description="blocks of one micro-batch at most, padding included, shared equally by its samples: bounds the "
        "memory of a step; null: anchors_per_sample alone does",
    )
    attention: Literal["auto", "dense"] = Field(
        "auto", description="auto: CPUs' flash kernel, CUDA's FlexAttention; dense: all weights in memory, anywhere"
    )
    gradient_checkpointing: bool = Field(
        False, description="keep no layer's insides for the backward pass, which computes them again: same bits, slower"
    )
    parallel: Literal["replicated", "sharded"] = Field(
        "replicated",
        description="what each of several ranks keeps between steps: all weights and the optimizer's state, or its "
        "share of them (FSDP2), with checkpoints in folders; either goes on with the other's",
    )

    @model_validator(mode="after")
    def _warm_up_ends_before_the_decay(self) -> "TrainSettings":
        if self.schedule == "wsd" and self.warmup_share + self.decay_share > 1:
            raise ValueError("warmup_share and decay_share must not be more than 1 together")
        return self

    @model_validator(mode="after")
    def _muon_has_whole_matrices(self) -> "TrainSettings":
        if self.parallel == "sharded" and self.optimizer == "muon":
            raise ValueError(
                "optimizer muon needs whole matrices, parallel sharded splits them: take adamw, or parallel replicated"
            )
        return self

    @model_validator(mode="after")
    def _every_sample_has_an_anchor(self) -> "TrainSettings":
        if self.max_anchors is not None and self.max_anchors < self.max_samples:
            raise ValueError(
                f"max_anchors ({self.max_anchors}) must be at least max_samples ({self.max_samples}), one a sample"
            )
        return self


class RemoteSettings(Settings):
    """A cache in an object store, where `cache_dir` is a URI: s3://…, gs://…, hdfs://…"""

    connections: PositiveInt = Field(16, description="ranged reads in flight at once")
    retry_seconds: NonNegativeFloat = Field(
        600.0, description="how long a read or a put is tried again before the run stops"
    )
    disk_cache_dir: str | None = Field(
        None, description="local folder that keeps what was read, for the next epoch; one for each process"
    )
    disk_cache_bytes: PositiveInt = Field(1 << 38, description="its size at most; what was unused longest goes first")
    staging_dir: str | None = Field(
        None,
        description="local folder in which generate makes shards before it puts them; null: staging in disk_cache_dir, "
        "or ~/.cache/dflash-cache/staging",
    )
    staging_bytes: PositiveInt = Field(
        1 << 34,
        description="finished shards that wait there to be put, at most; then the target waits. Under torchrun of each "
        "worker",
    )
    check_puts: bool = Field(True, description="read every object back after its put and compare it")


class WandbSettings(Settings):
    """Logging to Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "dflash-cache"
    name: str | None = None
    group: str | None = None


class EvalSettings(Settings):
    """Speculative decoding with the target, to measure the drafter."""

    prompts: tuple[str, ...] = Field(
        (),
        description="JSONL files (or JSON, parquet, folders, globs) of prompts that training never saw; a prompt's "
        "category is its record's `category`, else the name of its file",
    )
    max_prompts: PositiveInt | None = Field(None, description="of each category at most, the first ones; null: all")
    max_new_tokens: PositiveInt = 128
    block_size: Annotated[int, Field(ge=2)] | None = Field(
        None, description="slots of a block, the anchor's included, at most as many as trained; null: as trained"
    )
    temperature: NonNegativeFloat = Field(
        0.0, description="0 is greedy; above, target and drafter are drawn from, and the target's distribution is kept"
    )
    seed: NonNegativeInt = Field(0, description="of the draws; each prompt has its own from it")
    batch_size: PositiveInt = Field(
        1, description="prompts of a category decoded at once, with and without the drafter"
    )
    dtype: Dtype = Field("float32", description="float32: greedy output must equal the target's own, token for token")
    device: str = "auto"


class Config(Settings):
    """All settings of a project; each command reads its sections and ignores the others."""

    cache_dir: str = Field(description="folder of the cache that generate writes and train reads, or a URI (s3://…)")
    run_dir: str = Field(description="folder of the training run: its plan, log and checkpoints")
    target: TargetSettings
    data: DataSettings
    respond: RespondSettings = RespondSettings()
    generate: GenerateSettings = GenerateSettings()
    drafter: DrafterSettings = DrafterSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    train: TrainSettings = TrainSettings()
    remote: RemoteSettings = RemoteSettings()
    wandb: WandbSettings = WandbSettings()
    eval: EvalSettings = EvalSettings()
