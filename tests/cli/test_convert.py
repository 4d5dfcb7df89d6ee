from pathlib import Path

from target.tiny_gguf import make_gemma, write_gguf


def test_a_file_without_a_chat_template_is_converted_and_its_lack_is_said(dflash, tmp_path: Path) -> None:
    path = write_gguf(make_gemma(), tmp_path / "base.gguf")
    outcome = dflash("convert", path, tmp_path / "base")
    assert outcome.code == 0, outcome.err
    assert "Its file holds no chat template (base models have none)" in outcome.out
    assert (tmp_path / "base" / "config.json").is_file()


def test_a_file_with_a_chat_template_keeps_it_and_nothing_is_said(dflash, tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    path = write_gguf(make_gemma(), tmp_path / "chat.gguf", {"tokenizer.chat_template": template})
    outcome = dflash("convert", path, tmp_path / "chat")
    assert outcome.code == 0, outcome.err
    assert "chat template" not in outcome.out
    assert (tmp_path / "chat" / "chat_template.jinja").read_text() == template


def test_what_cannot_be_read_whole_is_refused_in_one_sentence(dflash, tmp_path: Path) -> None:
    path = write_gguf(make_gemma(), tmp_path / "long.gguf", {"gemma3.rope.scaling.type": "linear"})
    outcome = dflash("convert", path, tmp_path / "long")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"Error: transformers cannot read all of {path} (it scales rotary positions: linear): use the model's original "
        "checkpoint.\n"
    )
