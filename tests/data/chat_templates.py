"""Chat templates in the manner of those in use, and tokenizers for them."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKED_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MARKED_WITHOUT_END = MARKED_CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")

# Drops thoughts before the last question, and writes empty ones where an answer after it has none.
THINKING = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.role == 'assistant' -%}
  {%- set words = m.content -%}{%- set thoughts = '' -%}
  {%- if m.reasoning_content is string -%}{%- set thoughts = m.reasoning_content -%}
  {%- elif '</think>' in words -%}
    {%- set thoughts = words.split('</think>')[0].split('<think>')[-1] -%}
    {%- set words = words.split('</think>')[-1] -%}
  {%- endif -%}
  {%- if loop.index0 > ns.last -%}
    {%- if loop.last or thoughts -%}{{- '<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' -}}{%- endif -%}
  {%- endif -%}
  {{- words.lstrip('\n') -}}
  {%- for call in m.tool_calls or [] -%}
    {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' -}}
  {%- endfor -%}
{%- else -%}
  {{- m.content -}}
{%- endif -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\n' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
{%- endif -%}
"""

# The system's words go into the first question, answers are stripped, and the end token follows a space.
INSTRUCTION = (
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}"
    "{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}[INST] {{ head if loop.first else '' }}{{ m.content }} [/INST]"
    "{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)

NO_TOKENS = (
    "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant:\n{% endif %}"
)

# The system's words go into the first question, the assistant is called otherwise, and roles have to alternate.
MERGING = (
    "{% set system = messages[0].content + '\n\n' if messages[0].role == 'system' else '' %}"
    "{% for m in (messages[1:] if system else messages) %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ system if loop.first else '' }}{{ m.content | trim }}<|im_end|>\n{% endfor %}"
)

# A call takes the place of the words, and the field alone makes a turn a call.
CALLING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n\n{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}<|im_end|>{% endfor %}"
)

# Thoughts are cut off, and the prompt of an answer has the mark that begins them.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}A:{{ m.content.split('</think>')[-1] }}"
    "{% else %}Q:{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>A:<think>\n{% endif %}"
)
