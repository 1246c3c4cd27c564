"""Short chat templates in the manner of the families in use: what they do with roles, contents and
history."""

HEAD = "{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] %}{% set rest = messages[1:] %}"
HEAD += "{% else %}{% set first = 'Be brief.' %}{% set rest = messages %}{% endif %}"
OPEN = "{% if add_generation_prompt %}"

CHATML = (
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ "
    "'<|im_start|>system\nHi<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% "
    "endfor %}" + OPEN + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (  # as Qwen2.5: a default system message, tools in it, tool answers gathered under one user
    "{%- if tools %}\n  {{- '<|im_start|>system\n' }}\n"
    "  {%- if messages[0].role == 'system' %}{{- messages[0].content }}"
    "{%- endif %}\n  {%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}{{- "
    "'<|im_end|>\n' }}\n"
    "{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + "
    "'<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>system\nHelp.<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{%- if m.role == 'user' or (m.role == 'system' and not loop.first) or"
    " (m.role == 'assistant' and not m.tool_calls) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{%- elif m.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
    "{%- if m.content %}{{- '\n' + m.content }}{%- endif %}"
    "{%- for call in m.tool_calls %}{{- '\n' + (call.function | tojson) }}{%- endfor %}{{- "
    "'<|im_end|>\n' }}"
    "{%- elif m.role == 'tool' %}{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}{{- '\n<tool_response>' + m.content + '</tool_response>' "
    "}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif "
    "%}"
    "{%- endif %}{%- endfor %}" + OPEN + "{{- '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # as Qwen3: thinking before the last question disappears, and the last reply gets an empty one
    "{%- set ns = namespace(open=true, last=messages|length - 1) %}"
    "{%- for m in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.open and m.role == 'user' and m.content is string and not "
    "m.content.startswith('<tool_response>') %}"
    "{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.content is string %}{%- set content = m.content %}{%- else %}"
    "{%- set content = '' %}{%- for part in m.content %}{%- set content = part.text %}{%- endfor "
    "%}{%- endif %}"
    "{%- if m.role == 'assistant' %}{%- set thought = '' %}{%- if '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') "
    "%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{- '<|im_start|>assistant\n<think>\n' + thought.strip('\n') + '\n</think>\n\n' + "
    "content.lstrip('\n') }}"
    "{%- else %}{{- '<|im_start|>assistant\n' + content }}{%- endif %}{{- '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}{%- endif %}{%- "
    "endfor %}" + OPEN + "{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
HEADERS = (  # as Llama 3: contents are trimmed
    "{% for m in messages %}{% set text = '<|im_start|>' + m['role'] + '\n\n' + m['content'] | "
    "trim + '<|im_end|>' %}"
    "{% if loop.index0 == 0 %}{% set text = '<|endoftext|>' + text %}{% endif %}{{ text }}{% "
    "endfor %}" + OPEN + "{{ '<|im_start|>assistant\n\n' }}{% endif %}"
)
DATED = (  # as Llama 3.1: writes the date
    "{%- if not day is defined %}{%- set day = strftime_now('%d %b %Y') %}{%- endif %}"
    + HEAD
    + "{{- '<|im_start|>system\n' + day + '\n' + first | trim + '<|im_end|>' }}{%- for m in rest %}"
    "{%- if not (m.role == 'tool' or 'tool_calls' in m) %}"
    "{{- '<|im_start|>' + m.role + '\n' + m['content'] | trim + '<|im_end|>' }}{%- endif %}{%- "
    "endfor %}" + OPEN + "{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
INSTRUCTIONS = (  # as Mistral: the system message moves with the last question
    HEAD + "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
    "{% if loop.last %}{{ '[INST]' + first + '\n\n' + m['content'] + '[/INST]' }}"
    "{% else %}{{ '[INST]' + m['content'] + '[/INST]' }}{% endif %}"
    "{% else %}{{ ' ' + m['content'] + '<|im_end|>' }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (  # as Gemma: no system message, the assistant has another name
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}{% set who = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<|im_start|>' + who + '\n' + m['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    + OPEN
    + "{{ '<|im_start|>model\n' }}{% endif %}"
)
MACROS = (
    "{% macro block(who, text) %}<|im_start|>{{ who }}\n{{ text }}<|im_end|>\n{% endmacro %}"
    "{% for m in messages %}{% if m.content != '' and m.role in ['user', 'system'] %}{{ "
    "block(m.role, m.content) }}"
    "{% else %}{% generation %}{{ block('model', m.get('content', '')) }}{% endgeneration %}{% "
    "endif %}{% endfor %}" + OPEN + "<|im_start|>model\n{% endif %}"
)
EDGES = (  # cuts signs off the ends, and only newlines of the whitespace
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.strip('-\n') }}<|im_end|>\n{% "
    "endfor %}" + OPEN + "<|im_start|>assistant\n{% endif %}"
)
FAMILIES = {
    "edges": EDGES,
    "chatml": CHATML,
    "tools": TOOLS,
    "thinking": THINKING,
    "headers": HEADERS,
    "dated": DATED,
    "instructions": INSTRUCTIONS,
    "no_system": NO_SYSTEM,
    "macros": MACROS,
}

# Templates that write tools and calls. What they do with them is more than joining contents.
XML_TOOLS = (  # as Qwen3-Coder: names and keys become tags
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}<function>\n"
    "<name>{{ tool.function.name }}</name>"
    "{% for key in tool.function.parameters.properties %}"
    "{{ '\n<' ~ key ~ '>' ~ tool.function.parameters.properties[key] | tojson ~ '</' ~ key ~ '>' "
    "}}{% endfor %}</function>{% endfor %}</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + call.function.name + '>' "
    "+ call.function.arguments + '</function>\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% "
    "endfor %}" + OPEN + "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
JOINED = (  # nothing stands between what others say
    "{% for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}{% endfor "
    "%}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.name }}{{ m.tool_call_id }}{{ "
    "m.content }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ "
    "call.function.arguments }}{{ call.id }}{% endfor %}<|im_end|>{% endfor %}"
    + OPEN
    + "<|im_start|>assistant\n{% endif %}"
)
BRACKETS = (  # as Mistral: marks in brackets, tools before the last question
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content "
    "}}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ {'content': m.content, 'call_id': "
    "m.tool_call_id} | tojson }}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls | "
    "tojson }}<|im_end|>{% else %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
)
CHANNELS = (  # as gpt-oss: the tool's name is part of a header
    "<|im_start|>developer{% for tool in tools or [] %}\n// {{ tool.function.description }}\ntype "
    "{{ tool.function.name }} = {% for key, spec in tool.function.parameters.properties.items() "
    "%}{{ key }}: {% if spec.type == 'object' %}object{% else %}{{ spec.type }}{% endif %}, {% "
    "endfor %}{% endfor %}<|im_end|>{% for m in messages %}{% if m.role == 'tool' %}"
    "<|im_start|>functions.{{ m.name }} to=assistant<|message|>{{ m.content | tojson }}<|im_end|>"
    "{% elif m.tool_calls %}<|im_start|>assistant to=functions.{{ m.tool_calls[0].function.name "
    "}}<|message|>{{ m.tool_calls[0].function.arguments }}<|im_end|>{% else %}<|im_start|>{{ m.role "
    "}}<|message|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    + OPEN
    + "<|im_start|>assistant{% endif %}"
)
TOOL_FAMILIES = {
    "tools": TOOLS,
    "xml_tools": XML_TOOLS,
    "joined": JOINED,
    "brackets": BRACKETS,
    "channels": CHANNELS,
}

OPAQUE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ EXPRESSION }}<|im_end|>\n{% endfor %}"
NOT_UNDERSTOOD = [
    "m.content[:40]",
    "m.content[0]",
    "m.content | upper",
    "m.content | length",
    "m.content | tojson",
    "m.content | safe",
    "('<b>' | safe) + m.content",
    "m.content.title()",
    "m.content.split()[0]",
    "m.content.split('x')[1]",
    "m.content.replace('', '-')",
    "m.content * 2",
    "'%s' % m.content",
    "m | tojson",
    "m.items() | list",
    "(m.content + '>').replace('->', '')",
    "'long' if m.content > 'k' else m.content",
    "'same' if m.content == messages[0].content else m.content",
    "m.content if m.role in m.content else ''",
    "'part' if m.content in 'abc' else m.content",
    "[m.content] | join",
    "[1, 2, 3] | random",
    "messages | map(attribute='content') | join",
    "lipsum()",
    "unknown(m.content)",
    "{m.content: 1}",
    "loop.changed(m.content)",
]
