"""Chat templates with what published ones do, each with the features of one family and nothing else of it."""

from __future__ import annotations

# Tools in the first message of the user; one call at a time; what a tool says is written as JSON.
LLAMA_31 = """\
{{- bos_token or '' }}
{%- set system = '' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '[system]\\n' }}{% if tools is not none %}{{ 'Environment: ipython\\n' }}{% endif %}{{ system + '[eot]' }}
{%- if tools is not none %}
    {{- '[user]\\nGiven the following functions:\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n' }}{% endfor %}
    {{- messages[0]['content'] | trim + '[eot]' }}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '[' + message['role'] + ']\\n' + message['content'] | trim + '[eot]' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '[assistant]\\n{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}{{ '}[eom]' }}
    {%- else %}
        {{- '[ipython]\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{ message.content | tojson }}
        {%- else %}{{ message.content }}{% endif %}
        {{- '[eot]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[assistant]\\n' }}{% endif %}
"""

# Hermes' calls; results of tools in one turn of the user; a system message where there is none.
QWEN_25 = """\
{%- if tools %}
    {{- '[im_start]system\\n' + (messages[0].content if messages[0].role == 'system' else 'You are helpful.') }}
    {{- '\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools>[im_end]\\n' }}
{%- elif messages[0].role == 'system' %}{{- '[im_start]system\\n' + messages[0].content + '[im_end]\\n' }}
{%- else %}{{- '[im_start]system\\nYou are helpful.[im_end]\\n' }}{% endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '[im_start]' + message.role + '\\n' + message.content + '[im_end]\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '[im_start]' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{% endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '[im_end]\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '[im_start]user' }}{% endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '[im_end]\\n' }}{% endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[im_start]assistant\\n' }}{% endif %}
"""

# Reasoning only after the last question; contents and arguments that may be no strings.
QWEN_3 = """\
{%- if tools %}
    {{- '[im_start]system\\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '[im_end]\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = messages | length - 1 - loop.index0 %}
    {%- if ns.found is not defined and message.role == 'user' and message.content is string %}
        {%- set ns.last = index %}{% set ns.found = true %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{% set content = message.content %}{% else %}{% set content = '' %}{% endif %}
    {%- if message.role in ['user', 'system'] %}{{- '[im_start]' + message.role + '\\n' + content + '[im_end]\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '[im_start]assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '[im_end]\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '[im_start]user\\n<tool_response>' + content + '</tool_response>[im_end]\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[im_start]assistant\\n' }}{% endif %}
"""

# Arguments as elements, one for each name: they must be an object.
QWEN_3_CODER = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content %}{{- item.text }}{% endfor %}{% endif %}
{%- endmacro %}
{%- for tool in tools or [] %}
    {{- '<function>' + tool.function.name + ': ' + tool.function.description }}
    {%- for name, field in tool.function.parameters.properties | items %}
        {{- ', ' + name + ': ' + field.type }}
    {%- endfor %}
    {{- '</function>\\n' }}
{%- endfor %}
{%- for message in messages %}
    {{- '[im_start]' + message.role + '\\n' + shown(message.content) }}
    {%- if message.tool_calls is defined and message.tool_calls is iterable and message.tool_calls | length > 0 %}
        {%- for call in message.tool_calls %}
            {{- '<function=' + call.function.name + '>' }}
            {%- for name, value in call.function.arguments | items %}
                {{- '<parameter=' + name + '>' + (value if value is string else value | tojson) + '</parameter>' }}
            {%- endfor %}
            {{- '</function>' }}
        {%- endfor %}
    {%- endif %}
    {{- '[im_end]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[im_start]assistant\\n' }}{% endif %}
"""

# Ids of nine letters for calls and results; tools before the last question; roles that alternate.
MISTRAL = """\
{%- set system = messages[0].content if messages[0].role == 'system' else none %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- if system %}{{- '[SYSTEM_PROMPT]' + system + '[/SYSTEM_PROMPT]' }}{% endif %}
{%- set ns = namespace(index=0, asked=0) %}
{%- for message in rest %}
    {%- if message.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}
    {%- if not (message.role == 'tool' or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('conversation roles must alternate user/assistant/user/assistant/...') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools and loop.index0 == ns.asked %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}{{- tool | tojson }}{{ ', ' if not loop.last }}{% endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}
            {{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
        {{- '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}{% endif %}
{%- endfor %}
"""

# No system role; roles that alternate; the assistant is called model.
GEMMA_2 = """\
{{- bos_token or '' }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '[start]' + role + '\\n' + message['content'] | trim + '[end]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[start]model\\n' }}{% endif %}
"""

# The system message before the first question; contents that may be lists of parts.
GEMMA_3 = """\
{%- if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{% set first = messages[0]['content'] + '\\n\\n' %}
    {%- else %}{% set first = messages[0]['content'][0]['text'] + '\\n\\n' %}{% endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{% set first = '' %}{% set loop_messages = messages %}{% endif %}
{%- for message in loop_messages %}
    {{- '[start]' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
    {{- first if loop.first else '' }}
    {%- if message['content'] is string %}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable %}
        {%- for item in message['content'] %}
            {{- '<image>' if item['type'] == 'image' else item['text'] | trim }}
        {%- endfor %}
    {%- else %}{{ raise_exception('Invalid content type') }}{% endif %}
    {{- '[end]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[start]model\\n' }}{% endif %}
"""

# All system messages first; calls told from turns without a content; arguments that are a text; reasoning cut off.
DEEPSEEK = """\
{%- set ns = namespace(system='', outputs=false) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{% endif %}
{%- endfor %}
{{- (bos_token or '') + ns.system }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[User]' + message['content'] }}
    {%- elif message['role'] == 'assistant' and 'tool_calls' in message %}
        {{- '[Assistant]' }}{% if message['content'] is not none %}{{- message['content'] }}{% endif %}
        {%- for tool in message['tool_calls'] %}
            {{- '[call]' + tool['type'] + '[sep]' + tool['function']['name'] + '\\n```json\\n' }}
            {{- tool['function']['arguments'] + '\\n```[/call]' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message['role'] == 'assistant' %}
        {%- set content = message['content'] %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- '[Assistant]' + content + eos_token }}
    {%- elif message['role'] == 'tool' %}{{- '[output]' + message['content'] + '[/output]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[Assistant]' }}{% endif %}
"""

# Harmony's channels: reasoning is `thinking`, a tool answers by the name of the last call.
GPT_OSS = """\
{{- '[start]system[message]Reasoning: ' + (reasoning_effort or 'medium') + '[end]' }}
{%- if messages[0].role == 'developer' or messages[0].role == 'system' %}
    {%- set developer = messages[0].content %}{% set loop_messages = messages[1:] %}
{%- else %}{% set developer = '' %}{% set loop_messages = messages %}{% endif %}
{%- if developer or tools %}
    {{- '[start]developer[message]' + developer }}
    {%- for tool in tools or [] %}
        {{- '\\n// ' + tool.function.description + '\\ntype ' + tool.function.name + ' = (_: ' }}
        {{- tool.function.parameters.properties | tojson }}{{- ') => any;' }}
    {%- endfor %}
    {{- '[end]' }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in loop_messages %}
    {%- if message.role == 'assistant' and 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function if message.tool_calls[0].function else message.tool_calls[0] %}
        {%- if message.content and message.thinking %}
            {{- raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}
        {%- elif message.content %}{{- '[start]assistant[channel]analysis[message]' + message.content + '[end]' }}
        {%- elif message.thinking %}{{- '[start]assistant[channel]analysis[message]' + message.thinking + '[end]' }}
        {%- endif %}
        {{- '[start]assistant to=functions.' + call.name + '[channel]commentary json[message]' }}
        {{- call.arguments | tojson }}{{- '[call]' }}
        {%- set last.name = call.name %}
    {%- elif message.role == 'assistant' and loop.last and not add_generation_prompt %}
        {%- if 'thinking' in message %}
            {{- '[start]assistant[channel]analysis[message]' + message.thinking + '[end]' }}
        {%- endif %}
        {{- '[start]assistant[channel]final[message]' + message.content + '[return]' }}
    {%- elif message.role == 'assistant' %}{{- '[start]assistant[channel]final[message]' + message.content + '[end]' }}
    {%- elif message.role == 'tool' %}
        {%- if last.name is none %}
            {{- raise_exception('Message has tool role, but there was no previous call!') }}
        {%- endif %}
        {{- '[start]functions.' + last.name + ' to=assistant[message]' + message.content | tojson + '[end]' }}
    {%- elif message.role == 'user' %}{{- '[start]user[message]' + message.content + '[end]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[start]assistant' }}{% endif %}
"""

# Any role by its name; tools may stand in the system message.
PHI_4_MINI = """\
{%- for message in messages %}
    {%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
        {{- '<|' + message['role'] + '|>' + message['content'] + '[tool]' + message['tools'] + '[/tool]<|end|>' }}
    {%- else %}{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""

# Calls as a list of actions; results as documents.
COMMAND_R = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set loop_messages = messages[1:] %}{% set system = messages[0]['content'] %}
{%- else %}{% set loop_messages = messages %}{% set system = 'You are Command.' %}{% endif %}
{{- '[SYSTEM]' + system }}
{%- for tool in tools or [] %}
    {{- '\\n' + tool['function']['name'] + ': ' + tool['function']['description'] | tojson }}
    {{- tool['function']['parameters']['properties'] | tojson }}
{%- endfor %}
{{- '[END]' }}
{%- for message in loop_messages %}
    {%- set content = message['content'] %}
    {%- if message.role == 'user' %}{{- '[USER]' + content.strip() + '[END]' }}
    {%- elif message.role == 'assistant' and message.tool_calls %}
        {{- '[CHATBOT]' }}{% if content %}{{- 'Plan: ' + content + '\\n' }}{% endif %}{{- 'Action: ```json\\n[' }}
        {%- for call in message.tool_calls %}
            {{- '{"tool_name": ' }}{{ call['function']['name'] | tojson }}{{ ', "parameters": ' }}
            {{- call['function']['arguments'] | tojson }}{{ '}' + (', ' if not loop.last else '') }}
        {%- endfor %}
        {{- ']```[END]' }}
    {%- elif message.role == 'assistant' %}{{- '[CHATBOT]' + content.strip() + '[END]' }}
    {%- elif message.role == 'tool' %}{{- '[SYSTEM]<results>\\nDocument: ' + content + '</results>[END]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[CHATBOT]' }}{% endif %}
"""

# Calls as one list in JSON.
GRANITE = """\
{%- if tools %}{{- '[role]tools[/role]' }}{{ tools | tojson(indent=4) }}{{ '[end]\\n' }}{% endif %}
{%- for message in messages %}
    {{- '[role]' + ('tool_response' if message['role'] == 'tool' else message['role']) + '[/role]' }}
    {%- if message['tool_calls'] %}
        {{- '<|tool_call|>' }}{{ message['tool_calls'] | map(attribute='function') | list | tojson }}
    {%- else %}{{- message['content'] }}{% endif %}
    {{- '[end]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '[role]assistant[/role]' }}{% endif %}
"""

# The end after every answer, and a line break only between turns; a call is one by its own field.
OLMO = """\
{{- bos_token or '' }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- '<|system|>\\n' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'user' %}{{- '<|user|>\\n' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'tool' %}{{- '<|environment|>\\n' + message['content'] + '\\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>\\n' }}
        {%- if message.get('content', none) is not none %}{{- message['content'] }}{% endif %}
        {%- if message.get('tool_calls', none) is not none %}
            {{- '<calls>' + message['tool_calls'][0]['function'] | tojson + '</calls>' }}
        {%- endif %}
        {{- eos_token + ('' if loop.last else '\\n') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}
"""

TEMPLATES = {
    "llama 3.1": LLAMA_31,
    "qwen 2.5": QWEN_25,
    "qwen 3": QWEN_3,
    "qwen 3 coder": QWEN_3_CODER,
    "mistral": MISTRAL,
    "gemma 2": GEMMA_2,
    "gemma 3": GEMMA_3,
    "deepseek": DEEPSEEK,
    "gpt-oss": GPT_OSS,
    "phi 4 mini": PHI_4_MINI,
    "command r": COMMAND_R,
    "granite": GRANITE,
    "olmo": OLMO,
}
