"""Chat templates of several kinds; GENERATION and END are where markers may stand."""

from __future__ import annotations

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' -%}
GENERATION{{ message.content + '<|im_end|>' }}END
{%- else -%}
{{ message.content + '<|im_end|>' }}
{%- endif -%}
{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
TRIMMED = """\
{{- '<|endoftext|>' }}
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '<|im_start|>\n\n' }}
{%- if message.role == 'assistant' -%}
GENERATION{{ message.content | trim + '<|im_end|>' }}END
{%- else -%}
{{ message.content | trim + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant<|im_start|>\n\n' }}{%- endif -%}
"""
# Brackets and no header: the prompt of an assistant turn is just what the user said.
BRACKETS = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
GENERATION{{ ' ' + message.content + '<|im_end|>' }}END
{%- else -%}
{{ '[INST] ' + message.content + ' [/INST]' }}
{%- endif -%}
{%- endfor -%}
"""
# Opens the last turn, and no earlier one, with an empty block for reasoning.
REASONING = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{%- set parts = message.content.split('</think>') -%}
{{ (message.content if loop.last else parts[-1]) + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
HEADERLESS_PROMPT = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor -%}
"""


# The model itself emits the channel behind the generation prompt.
CHANNEL = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ '<|im_start|>assistant' }}
{%- set answer = '<|endoftext|>final\n' + message.content -%}
GENERATION{{ answer + '<|im_end|>' }}END
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant' }}{%- endif -%}
"""


# As Qwen3.5's: the prompt of an answer has an empty block for reasoning, earlier answers have none.
PROMPTED = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'assistant' and loop.last -%}{{ '<think>\n\n</think>\n\n' }}{%- endif -%}
{{ message.content + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}
{%- endif -%}
"""
# As gpt-oss's: the last answer ends in another token.
OTHER_END = CHANNEL.replace(
    "{{ answer + '<|im_end|>' }}",
    "{{ answer + ('<|endoftext|>' if loop.last else '<|im_end|>') }}",
)
# As Phi-3's: a token is behind the whole conversation.
BEHIND = CHATML.replace(
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}",
    "{{ '<|im_start|>assistant\n' if add_generation_prompt else '<|endoftext|>' }}",
)


def without_markers(template: str) -> str:
    """``template`` without its generation markers."""
    return template.replace("GENERATION", "").replace("END", "")


def with_markers(template: str) -> str:
    """``template`` with its generation markers."""
    return template.replace("GENERATION", "{%- generation -%}").replace(
        "END", "{%- endgeneration -%}"
    )
