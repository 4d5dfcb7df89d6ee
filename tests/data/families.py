"""The chat formats of model families, each as a short template of our own, and what is trained on, written by hand.

Every format gives what the family's published template gives for these conversations; tools, dates and long default
prompts are left out. In the expectations ⟦ and ⟧ enclose what is trained on. The four conversations:

    one          Hello / Hi there.
    one_system   Be brief. / Hello / Hi there.
    two          Hello / Hi there. / And you? / Fine.
    two_system   Be brief. / Hello / Hi there. / And you? / Fine.

`refused` in an expectation's place: the reason that such conversations are left out and counted under.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Refused:
    reason: str


@dataclass(frozen=True)
class Family:
    """`stops`: the target's stop tokens, its tokenizer's end of sequence first; `special`: its other special tokens."""

    name: str
    template: str
    stops: tuple[str, ...]
    special: tuple[str, ...]
    one: str | Refused
    one_system: str | Refused
    two: str | Refused
    two_system: str | Refused
    begin: str = "<|begin_of_text|>"


CHANGED = Refused("the chat template changes the prompt once it is answered")

CHATML_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
CHATML_ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
ALTERNATE = (
    "{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% endfor %}"
)
SPLIT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set talk = messages[1:] %}"
    "{% else %}{% set system = '' %}{% set talk = messages %}{% endif %}"
)

FAMILIES = [
    Family(
        name="Qwen2.5: a system prompt by default",
        template="{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}" + CHATML_TURN + "{% endfor %}" + CHATML_ASK,
        stops=("<|im_end|>", "<|endoftext|>"),
        special=("<|im_start|>",),
        one="<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hi there.<|im_end|>⟧\n",
        one_system="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hi there.<|im_end|>⟧\n",
        two="<|im_start|>system\nYou are Qwen.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hi there.<|im_end|>⟧\n<|im_start|>user\nAnd you?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Fine.<|im_end|>⟧\n",
        two_system="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hi there.<|im_end|>⟧\n<|im_start|>user\nAnd you?<|im_end|>\n"
        "<|im_start|>assistant\n⟦Fine.<|im_end|>⟧\n",
    ),
    Family(
        name="Qwen3: an empty think block before the last answer alone",
        template="{% for m in messages %}{% if m.role == 'assistant' and loop.last %}"
        "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + m.content + '<|im_end|>\n' }}"
        "{% else %}" + CHATML_TURN + "{% endif %}{% endfor %}" + CHATML_ASK,
        stops=("<|im_end|>", "<|endoftext|>"),
        special=("<|im_start|>",),
        one="<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHi there.<|im_end|>⟧\n",
        one_system="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nHi there.<|im_end|>⟧\n",
        two="<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n⟦Hi there.<|im_end|>⟧\n"
        "<|im_start|>user\nAnd you?<|im_end|>\n<|im_start|>assistant\n⟦<think>\n\n</think>\n\nFine.<|im_end|>⟧\n",
        two_system="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n⟦Hi there.<|im_end|>⟧\n<|im_start|>user\nAnd you?<|im_end|>\n"
        "<|im_start|>assistant\n⟦<think>\n\n</think>\n\nFine.<|im_end|>⟧\n",
    ),
    Family(
        name="Llama 3: contents trimmed",
        template="{{ bos_token }}{% for m in messages %}"
        "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        stops=("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        special=("<|start_header_id|>", "<|end_header_id|>"),
        one="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hi there.<|eot_id|>⟧",
        one_system="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hi there.<|eot_id|>⟧",
        two="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hi there.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Fine.<|eot_id|>⟧",
        two_system="<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Hi there.<|eot_id|>⟧"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd you?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n⟦Fine.<|eot_id|>⟧",
    ),
    Family(
        name="Llama 2: the system prompt inside the first user turn, no beginning of an answer to ask with",
        template=SPLIT_SYSTEM + ALTERNATE + "{% for m in talk %}"
        "{% if m.role == 'user' %}{{ bos_token + '[INST] ' }}{% if loop.first and system %}"
        "{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}{{ m.content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        stops=("</s>",),
        special=(),
        begin="<s>",
        one="<s>[INST] Hello [/INST]⟦ Hi there. </s>⟧",
        one_system="<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST]⟦ Hi there. </s>⟧",
        two="<s>[INST] Hello [/INST]⟦ Hi there. </s>⟧<s>[INST] And you? [/INST]⟦ Fine. </s>⟧",
        two_system="<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHello [/INST]⟦ Hi there. </s>⟧"
        "<s>[INST] And you? [/INST]⟦ Fine. </s>⟧",
    ),
    Family(
        name="Mistral 7B v0.1: no system prompt",
        template="{% set talk = messages %}" + ALTERNATE + "{{ bos_token }}{% for m in talk %}"
        "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}",
        stops=("</s>",),
        special=("[INST]", "[/INST]"),
        begin="<s>",
        one="<s>[INST] Hello [/INST]⟦Hi there.</s>⟧",
        one_system=Refused("refused by the chat template"),
        two="<s>[INST] Hello [/INST]⟦Hi there.</s>⟧[INST] And you? [/INST]⟦Fine.</s>⟧",
        two_system=Refused("refused by the chat template"),
    ),
    Family(
        name="Mistral v3: the system prompt in a last user turn alone, so that it goes once there is an answer",
        template=SPLIT_SYSTEM + ALTERNATE + "{{ bos_token }}{% for m in talk %}"
        "{% if m.role == 'user' %}{{ '[INST] ' }}{% if loop.last and system %}{{ system + '\n\n' }}{% endif %}"
        "{{ m.content + '[/INST]' }}{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}",
        stops=("</s>",),
        special=("[INST]", "[/INST]"),
        begin="<s>",
        one="<s>[INST] Hello[/INST]⟦ Hi there.</s>⟧",
        one_system=CHANGED,
        two="<s>[INST] Hello[/INST]⟦ Hi there.</s>⟧[INST] And you?[/INST]⟦ Fine.</s>⟧",
        two_system=CHANGED,
    ),
    Family(
        name="Gemma 1 and 2: the role is model, no system prompt, a line end that no model says",
        template="{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('No system role') }}"
        "{% endif %}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
        "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        stops=("<eos>", "<end_of_turn>"),
        special=("<start_of_turn>",),
        begin="<bos>",
        one="<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n⟦Hi there.<end_of_turn>⟧\n",
        one_system=Refused("refused by the chat template"),
        two="<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n⟦Hi there.<end_of_turn>⟧\n"
        "<start_of_turn>user\nAnd you?<end_of_turn>\n<start_of_turn>model\n⟦Fine.<end_of_turn>⟧\n",
        two_system=Refused("refused by the chat template"),
    ),
    Family(
        name="Gemma 3: the system prompt begins the first user turn",
        template=SPLIT_SYSTEM + ALTERNATE + "{{ bos_token }}{% for m in talk %}"
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}{{ m.content | trim + '<end_of_turn>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        stops=("<eos>", "<end_of_turn>"),
        special=("<start_of_turn>",),
        begin="<bos>",
        one="<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n⟦Hi there.<end_of_turn>⟧\n",
        one_system="<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n"
        "<start_of_turn>model\n⟦Hi there.<end_of_turn>⟧\n",
        two="<bos><start_of_turn>user\nHello<end_of_turn>\n<start_of_turn>model\n⟦Hi there.<end_of_turn>⟧\n"
        "<start_of_turn>user\nAnd you?<end_of_turn>\n<start_of_turn>model\n⟦Fine.<end_of_turn>⟧\n",
        two_system="<bos><start_of_turn>user\nBe brief.\n\nHello<end_of_turn>\n"
        "<start_of_turn>model\n⟦Hi there.<end_of_turn>⟧\n<start_of_turn>user\nAnd you?<end_of_turn>\n"
        "<start_of_turn>model\n⟦Fine.<end_of_turn>⟧\n",
    ),
    Family(
        name="Phi-3: end of sequence after the whole, which ends no answer",
        template="{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
        stops=("<|endoftext|>", "<|end|>"),
        special=("<|system|>", "<|user|>", "<|assistant|>"),
        one="<|user|>\nHello<|end|>\n<|assistant|>\n⟦Hi there.<|end|>⟧\n<|endoftext|>",
        one_system="<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n"
        "⟦Hi there.<|end|>⟧\n<|endoftext|>",
        two="<|user|>\nHello<|end|>\n<|assistant|>\n⟦Hi there.<|end|>⟧\n"
        "<|user|>\nAnd you?<|end|>\n<|assistant|>\n⟦Fine.<|end|>⟧\n<|endoftext|>",
        two_system="<|system|>\nBe brief.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\n⟦Hi there.<|end|>⟧\n"
        "<|user|>\nAnd you?<|end|>\n<|assistant|>\n⟦Fine.<|end|>⟧\n<|endoftext|>",
    ),
    Family(
        name="Phi-4: no line ends",
        template="{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        stops=("<|im_end|>", "<|endoftext|>"),
        special=("<|im_start|>", "<|im_sep|>"),
        one="<|im_start|>user<|im_sep|>Hello<|im_end|><|im_start|>assistant<|im_sep|>⟦Hi there.<|im_end|>⟧",
        one_system="<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hello<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Hi there.<|im_end|>⟧",
        two="<|im_start|>user<|im_sep|>Hello<|im_end|><|im_start|>assistant<|im_sep|>⟦Hi there.<|im_end|>⟧"
        "<|im_start|>user<|im_sep|>And you?<|im_end|><|im_start|>assistant<|im_sep|>⟦Fine.<|im_end|>⟧",
        two_system="<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hello<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Hi there.<|im_end|>⟧<|im_start|>user<|im_sep|>And you?<|im_end|>"
        "<|im_start|>assistant<|im_sep|>⟦Fine.<|im_end|>⟧",
    ),
    Family(
        name="DeepSeek V3: the system prompt without a mark",
        template="{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% else %}{{ '<｜Assistant｜>' + m.content + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
        stops=("<｜end▁of▁sentence｜>",),
        special=("<｜User｜>", "<｜Assistant｜>"),
        begin="<｜begin▁of▁sentence｜>",
        one="<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜>⟦Hi there.<｜end▁of▁sentence｜>⟧",
        one_system="<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hello<｜Assistant｜>⟦Hi there.<｜end▁of▁sentence｜>⟧",
        two="<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜>⟦Hi there.<｜end▁of▁sentence｜>⟧"
        "<｜User｜>And you?<｜Assistant｜>⟦Fine.<｜end▁of▁sentence｜>⟧",
        two_system="<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hello<｜Assistant｜>⟦Hi there.<｜end▁of▁sentence｜>⟧"
        "<｜User｜>And you?<｜Assistant｜>⟦Fine.<｜end▁of▁sentence｜>⟧",
    ),
    Family(
        name="DeepSeek R1: asks with <think>, which answers have not: no such answer is the target's own",
        template="{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}"
        "{% elif m.role == 'user' %}{{ '<｜User｜>' + m.content }}"
        "{% else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}",
        stops=("<｜end▁of▁sentence｜>",),
        special=("<｜User｜>", "<｜Assistant｜>"),
        begin="<｜begin▁of▁sentence｜>",
        one=CHANGED,
        one_system=CHANGED,
        two=CHANGED,
        two_system=CHANGED,
    ),
    Family(
        name="GLM-4: an answer ends where the next turn begins, with a token that stops the target",
        template="[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        one="[gMASK]<sop><|user|>\nHello<|assistant|>\n⟦Hi there.⟧",
        one_system="[gMASK]<sop><|system|>\nBe brief.<|user|>\nHello<|assistant|>\n⟦Hi there.⟧",
        two="[gMASK]<sop><|user|>\nHello<|assistant|>\n⟦Hi there.<|user|>⟧\nAnd you?<|assistant|>\n⟦Fine.⟧",
        two_system="[gMASK]<sop><|system|>\nBe brief.<|user|>\nHello<|assistant|>\n⟦Hi there.<|user|>⟧"
        "\nAnd you?<|assistant|>\n⟦Fine.⟧",
    ),
    Family(
        name="GLM-4.6: every answer says its own empty think block",
        template="[gMASK]<sop>{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|assistant|>\n<think></think>\n' + m.content.strip() }}"
        "{% else %}{{ '<|' + m.role + '|>\n' + m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        one="[gMASK]<sop><|user|>\nHello<|assistant|>⟦\n<think></think>\nHi there.⟧",
        one_system="[gMASK]<sop><|system|>\nBe brief.<|user|>\nHello<|assistant|>⟦\n<think></think>\nHi there.⟧",
        two="[gMASK]<sop><|user|>\nHello<|assistant|>⟦\n<think></think>\nHi there.<|user|>⟧\nAnd you?"
        "<|assistant|>⟦\n<think></think>\nFine.⟧",
        two_system="[gMASK]<sop><|system|>\nBe brief.<|user|>\nHello<|assistant|>⟦\n<think></think>\nHi there.<|user|>⟧"
        "\nAnd you?<|assistant|>⟦\n<think></think>\nFine.⟧",
    ),
    Family(
        name="Granite 3",
        template="{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + "
        "'<|end_of_text|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}",
        stops=("<|end_of_text|>",),
        special=("<|start_of_role|>", "<|end_of_role|>"),
        one="<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦Hi there.<|end_of_text|>⟧\n",
        one_system="<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦Hi there.<|end_of_text|>⟧\n",
        two="<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦Hi there.<|end_of_text|>⟧\n"
        "<|start_of_role|>user<|end_of_role|>And you?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦Fine.<|end_of_text|>⟧\n",
        two_system="<|start_of_role|>system<|end_of_role|>Be brief.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦Hi there.<|end_of_text|>⟧\n"
        "<|start_of_role|>user<|end_of_role|>And you?<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>⟦Fine.<|end_of_text|>⟧\n",
    ),
    Family(
        name="OLMo 2: a line end after an answer once more follows; headers are plain text",
        template="{{ bos_token }}{% for m in messages %}{% if m.role != 'assistant' %}"
        "{{ '<|' + m.role + '|>\n' + m.content + '\n' }}{% else %}"
        "{{ '<|assistant|>\n' + m.content + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        stops=("<|endoftext|>",),
        special=(),
        begin="<|endoftext|>",
        one="<|endoftext|><|user|>\nHello\n<|assistant|>\n⟦Hi there.<|endoftext|>⟧",
        one_system="<|endoftext|><|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\n⟦Hi there.<|endoftext|>⟧",
        two="<|endoftext|><|user|>\nHello\n<|assistant|>\n⟦Hi there.<|endoftext|>⟧\n"
        "<|user|>\nAnd you?\n<|assistant|>\n⟦Fine.<|endoftext|>⟧",
        two_system="<|endoftext|><|system|>\nBe brief.\n<|user|>\nHello\n<|assistant|>\n⟦Hi there.<|endoftext|>⟧\n"
        "<|user|>\nAnd you?\n<|assistant|>\n⟦Fine.<|endoftext|>⟧",
    ),
    Family(
        name="Command R",
        template=SPLIT_SYSTEM + ALTERNATE + "{{ bos_token }}{% if system %}"
        "{{ '<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>' + system + '<|END_OF_TURN_TOKEN|>' }}{% endif %}"
        "{% for m in talk %}{% set role = '<|USER_TOKEN|>' if m.role == 'user' else '<|CHATBOT_TOKEN|>' %}"
        "{{ '<|START_OF_TURN_TOKEN|>' + role + m.content.strip() + '<|END_OF_TURN_TOKEN|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}",
        stops=("<|END_OF_TURN_TOKEN|>",),
        special=("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
        begin="<BOS_TOKEN>",
        one="<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Hi there.<|END_OF_TURN_TOKEN|>⟧",
        one_system="<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Hi there.<|END_OF_TURN_TOKEN|>⟧",
        two="<BOS_TOKEN><|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Hi there.<|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>And you?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Fine.<|END_OF_TURN_TOKEN|>⟧",
        two_system="<BOS_TOKEN><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hello<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Hi there.<|END_OF_TURN_TOKEN|>⟧"
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>And you?<|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>⟦Fine.<|END_OF_TURN_TOKEN|>⟧",
    ),
    Family(
        name="SmolLM3 without thinking: its own marks enclose header, prompted think block and line end",
        template=SPLIT_SYSTEM + "{{ '<|im_start|>system\n' + (system or 'You are SmolLM.') + '<|im_end|>\n' }}"
        "{% for m in talk %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ '<|im_start|>assistant\n<think>\n\n</think>\n' + m.content + '<|im_end|>\n' }}{% endgeneration %}"
        "{% else %}" + CHATML_TURN + "{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n' }}{% endif %}",
        stops=("<|im_end|>",),
        special=("<|im_start|>",),
        one="<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n⟦Hi there.<|im_end|>⟧\n",
        one_system="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n⟦Hi there.<|im_end|>⟧\n",
        two="<|im_start|>system\nYou are SmolLM.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n⟦Hi there.<|im_end|>⟧\n<|im_start|>user\nAnd you?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n⟦Fine.<|im_end|>⟧\n",
        two_system="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n⟦Hi there.<|im_end|>⟧\n<|im_start|>user\nAnd you?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n⟦Fine.<|im_end|>⟧\n",
    ),
    Family(
        name="gpt-oss: the target says its channel; the last answer ends otherwise than those before",
        template=SPLIT_SYSTEM + "{{ '<|start|>system<|message|>You are ChatGPT.<|end|>' }}"
        "{% if system %}{{ '<|start|>developer<|message|># Instructions\n\n' + system + '\n\n<|end|>' }}{% endif %}"
        "{% for m in talk %}{% if m.role == 'user' %}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}"
        "{% else %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
        "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}",
        stops=("<|return|>", "<|endoftext|>", "<|call|>"),
        special=("<|start|>", "<|message|>", "<|channel|>", "<|end|>"),
        one="<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>Hello<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hi there.<|return|>⟧",
        one_system="<|start|>system<|message|>You are ChatGPT.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>Hello<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hi there.<|return|>⟧",
        two="<|start|>system<|message|>You are ChatGPT.<|end|><|start|>user<|message|>Hello<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hi there.<|end|>⟧<|start|>user<|message|>And you?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Fine.<|return|>⟧",
        two_system="<|start|>system<|message|>You are ChatGPT.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief.\n\n<|end|><|start|>user<|message|>Hello<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Hi there.<|end|>⟧<|start|>user<|message|>And you?<|end|>"
        "<|start|>assistant⟦<|channel|>final<|message|>Fine.<|return|>⟧",
    ),
    Family(
        name="Zephyr and StableLM 2: headers are plain text, end of sequence after every turn",
        template="{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        stops=("</s>",),
        special=(),
        begin="<s>",
        one="<|user|>\nHello</s>\n<|assistant|>\n⟦Hi there.</s>⟧\n",
        one_system="<|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\n⟦Hi there.</s>⟧\n",
        two="<|user|>\nHello</s>\n<|assistant|>\n⟦Hi there.</s>⟧\n<|user|>\nAnd you?</s>\n<|assistant|>\n⟦Fine.</s>⟧\n",
        two_system="<|system|>\nBe brief.</s>\n<|user|>\nHello</s>\n<|assistant|>\n⟦Hi there.</s>⟧\n"
        "<|user|>\nAnd you?</s>\n<|assistant|>\n⟦Fine.</s>⟧\n",
    ),
]
