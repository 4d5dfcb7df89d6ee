"""Whether a published drafter's factors and cap are those of the target that it shall draft for."""

from dataclasses import replace

import pytest
from drafter.tiny_drafter import SIZES
from transformers import Gemma2Config, PretrainedConfig

from dflash_cache.config.settings import DrafterSettings
from dflash_cache.decode.fit import check_fits
from dflash_cache.drafter.model import Drafter
from dflash_cache.drafter.shape import shape_from_target
from dflash_cache.errors import RunError

TARGET = Gemma2Config(**SIZES, num_key_value_heads=3, head_dim=8, final_logit_softcapping=30.0)


def published(target: PretrainedConfig, **named: float | None) -> Drafter:
    """A drafter without a record of its target, whose config names these."""
    shape = shape_from_target(target, DrafterSettings(num_layers=1), (1, 3), 99)
    return Drafter(replace(shape, **named))


@pytest.mark.parametrize("named", [{}, {"softcap": None}, {"embedding_scale": 6.9375}])
def test_a_drafter_that_names_the_targets_own_or_no_cap_is_taken(named: dict[str, float | None]) -> None:
    check_fits(published(TARGET, **named), TARGET, "")


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"softcap": 20.0}, "softcap 20.0, not 30.0"),
        ({"logit_scale": 0.5}, "logit_scale 0.5, not 1.0"),
        ({"embedding_scale": 1.0}, "embedding_scale 1.0, not 6.928203230275509"),
    ],
)
def test_a_drafter_that_names_another_factor_or_cap_than_the_target_has_is_refused(
    named: dict[str, float | None], told: str
) -> None:
    with pytest.raises(RunError) as caught:
        check_fits(published(TARGET, **named), TARGET, "")
    assert str(caught.value) == (
        f"The drafter was trained for another target ({told}): set target.model to its target."
    )
