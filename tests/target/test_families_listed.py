"""README's list of families is that of the tests: what it says was tested, was."""

import re
from pathlib import Path

from decode.families import ALONE, RECURRENT, SLIDING
from target.architectures import EXPORTED, REFUSED_BY_SPECULATORS

README = Path(__file__).parents[2] / "README.md"
GROUPS = {
    "layers that attend to the whole text": EXPORTED.keys() - SLIDING - ALONE,
    "sliding windows": SLIDING,
    "recurrent layers": RECURRENT,
    "convolutions": ALONE - RECURRENT,
}


def read_table() -> dict[str, str]:
    """The cell of every family's row, by what the row is called."""
    rows = re.findall(r"^\| ([a-z ]+) \| [^|]+ \| ([^|]+) \|$", README.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: families for name, families in rows if name in GROUPS}


def test_every_family_stands_in_the_row_of_what_its_decoding_was_tested_with() -> None:
    assert {name: set(cell.split(", ")) for name, cell in read_table().items()} == GROUPS


def test_the_number_of_families_and_the_ones_that_one_format_refuses_are_named() -> None:
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"{len(EXPORTED)} families are tested" in text
    refused = text.partition("all but these: ")[2].partition(".)")[0]
    assert set(refused.split(", ")) == set(REFUSED_BY_SPECULATORS)
