"""Chat templates: the text that transformers renders, and foreign code that gets nowhere."""

import gc
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from jinja2.exceptions import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from strata.text.chat_template import Rendering, TemplateRenderer
from strata.text.template_worker import check_syntax

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}{{ '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Cutting Knowledge Date: December 2023\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" -%}
    {%- set system_message = messages[0]["content"] -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{{- bos_token -}}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {% if loop.last and system_message is defined %}
            {{ '[INST] ' + system_message + '\\n\\n' + message['content'] + '[/INST]' }}
        {% else %}
            {{ '[INST] ' + message['content'] + '[/INST]' }}
        {% endif %}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + message['content'] + eos_token}}
    {% endif %}
{% endfor %}
"""

MACROS = """\
{%- macro show(content) -%}
    {%- if content is string %}{{ content | replace('\\n', '|') }}
    {%- else %}{{ raise_exception('the content is no string') }}
    {%- endif -%}
{%- endmacro -%}
{%- set state = namespace(last=-1, names=[]) %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {%- if message.role == 'stop' %}{% break %}{% endif %}
    {%- set state.last = loop.index0 %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
        {%- generation %}{% set seen = 1 %}A: {{ show(message.content) }}{% endgeneration %}{{ seen is defined }}
    {%- else %}
{{ message.role | upper }}: {{ show(message.content) }}
    {%- endif %}
{% endfor %}
last={{ state.last }} {{ dict(a=1, b='ü<&>') | tojson }} {{ messages | map(attribute='role') | join(',') }}
{{ messages[0] | tojson(indent=2) }}
"""

PLAIN = [
    {"role": "user", "content": "  What is 47 + 38? "},
    {"role": "assistant", "content": "It is 85 — <b>ü</b> 😀."},
    {"role": "user", "content": "Thanks\n"},
]
CHATS = {
    "plain": PLAIN,
    "system": [{"role": "system", "content": "Be brief.\n"}, *PLAIN],
    "nulls": [{"role": "user", "content": "Hi", "name": None, "tool_calls": None}],
    "reasoning": [*PLAIN[:1], {"role": "assistant", "content": "85", "reasoning": "40 + 30 + 15"}],
    "surrogate": [{"role": "user", "content": "half \ud83d of a pair"}],
}
JUMPS = [
    {"role": "user", "content": "one\ntwo"},
    {"role": "skip", "content": "x"},
    {"role": "assistant", "content": "yes", "thinking": "hm"},
    {"role": "stop", "content": "x"},
]
ADD = {"name": "add", "description": "", "parameters": {"type": "object", "description": "<ü>"}}
TOOLS = [{"type": "function", "function": ADD}]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.fixture(scope="module")
def renderer():
    renderer = TemplateRenderer(deadline=20.0)
    yield renderer
    renderer.close()


def ours(renderer, template, messages, **options):
    return renderer.render(Rendering.of_chat(template, messages, special_tokens=SPECIAL, **options)).text


def theirs(template, messages, **options):
    """As `apply_chat_template` calls it, which leaves out keys without a value."""
    present = [{key: value for key, value in message.items() if value is not None} for message in messages]
    options = {"add_generation_prompt": True, **options}
    return render_jinja_template([present], chat_template=template, **SPECIAL, **options)[0][0]


def worker_of(renderer: TemplateRenderer) -> int:
    return renderer._worker._helper.process.pid


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("template", [CHATML, LLAMA3, MISTRAL, MACROS], ids=["chatml", "llama3", "mistral", "macros"])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_text_is_that_of_transformers(renderer, template, chat, prompt):
    messages = CHATS[chat]
    assert ours(renderer, template, messages, add_generation_prompt=prompt) == theirs(
        template, messages, add_generation_prompt=prompt
    )


def test_macros_namespaces_loop_controls_and_generation_blocks(renderer):
    text = ours(renderer, MACROS, JUMPS)
    # transformers gives a template the reasoning by the name that it came by.
    assert text == theirs(MACROS, [{**one, "reasoning_content": one.get("thinking")} for one in JUMPS])
    assert "one|two" in text
    assert "<think>hm</think>A: yesFalse" in text
    assert "last=2" in text


def test_tools_are_shown_as_transformers_shows_them(renderer):
    text = ours(renderer, CHATML, PLAIN, tools=TOOLS)
    assert text == theirs(CHATML, PLAIN, tools=TOOLS)
    assert json.dumps(TOOLS[0], ensure_ascii=False) in text


@pytest.mark.parametrize(
    ("template", "content"),
    [
        (CHATML, "It is 8"),
        (CHATML, "It is "),
        (LLAMA3, "It is "),
        (MISTRAL, "It is 8"),
    ],
    ids=["chatml", "chatml, space", "llama3, stripped", "mistral"],
)
def test_last_message_is_left_open(renderer, template, content):
    messages = [*PLAIN[:1], {"role": "assistant", "content": content}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = ours(renderer, template, messages, **options)
    assert text == theirs(template, messages, **options)
    assert text.rstrip().endswith(("It is 8", "It is"))


@pytest.mark.parametrize(
    "shown",
    ["{{ it }}", "{{ '(' + it }}", "{{ it + ')' }}", "{{ '(' ~ it }}", "{{ '%s' | format(it) }}", "{{ it | trim }}"],
)
def test_arguments_that_a_template_puts_into_a_text_are_json(renderer, shown):
    """To transformers such a template needs the text; an object shows its arguments as Python writes them, or fails."""
    template = "{% set it = messages[0].tool_calls[0].function.arguments %}" + shown
    arguments = {"a": [1, None, True], "ü": "it's"}
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps(arguments, ensure_ascii=False)}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ours(renderer, template, messages) == theirs(template, messages)


def test_arguments_are_an_object(renderer):
    template = (
        "{% set it = messages[0].tool_calls[0].function.arguments %}{{ it is mapping }} {{ it is string }} {{ it.a }}"
        "{% for key, value in it.items() %}{{ key }}{% endfor %}{{ it | tojson }}{{ it | length }}{{ it == {'a': 1} }}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    assert ours(renderer, template, messages) == theirs(template, messages)
    with pytest.raises(ValueError, match="chat template failed"):
        ours(renderer, "{{ messages[0].tool_calls[0].function.arguments.update(b=1) }}", messages)


def test_leaving_open_what_is_not_there_is_refused(renderer):
    with pytest.raises(ValueError, match="add_generation_prompt=False"):
        ours(renderer, CHATML, PLAIN, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(ValueError, match="does not show the last message"):
        ours(renderer, "nothing", PLAIN, **options)
    with pytest.raises(ValueError, match="last message with a content"):
        ours(renderer, CHATML, [{"role": "observation"}], **options)


@pytest.mark.parametrize(
    "messages",
    [[], "hello", {"role": "user"}, ["hello"], [{"content": "x"}], [{"role": 1, "content": "x"}]],
)
def test_what_is_no_chat_is_refused(renderer, messages):
    with pytest.raises(ValueError, match="messages"):
        ours(renderer, CHATML, messages)


def test_values_that_are_not_json_are_refused(renderer):
    with pytest.raises(ValueError, match="plain JSON values"):
        ours(renderer, CHATML, [{"role": "user", "content": "x", "name": object()}])


def test_words_of_the_template_reach_the_caller(renderer):
    with pytest.raises(ValueError, match="roles must alternate"):
        ours(renderer, MISTRAL, PLAIN[1:])
    with pytest.raises(ValueError, match="syntax error in line 2"):
        ours(renderer, "fine\n{% for %}", PLAIN)
    with pytest.raises(ValueError, match="TypeError"):
        ours(renderer, "{{ messages + 1 }}", PLAIN)


ATTACKS = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'].modules }}",
    "attr filter": "{{ (messages | attr('__class__'))() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format by filter": "{{ ('{0.__class__.__init__.__globals__}' | attr('format'))(messages) }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "self": "{{ self.__init__.__globals__ }}",
    "mutation": "{{ messages.append(1) }}",
    "import": "{% import 'os' as os %}",
    "include": "{% include '/etc/passwd' %}",
    "namespace internals": "{% set n = namespace(__class__=1) %}",
    "namespace assignment": "{% set n = namespace() %}{% set n.__class__ = 1 %}",
    "huge range": "{% for i in range(1000000) %}{% endfor %}",
    "memory": "{{ ('a' * 2000000000) | length }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "long error": "{{ raise_exception('a' * 100000000) }}",
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
def test_attack_is_refused_and_the_next_rendering_works(renderer, attack):
    with pytest.raises(ValueError, match="chat template failed") as caught:
        ours(renderer, attack, PLAIN)
    assert len(str(caught.value)) < 1200
    assert ours(renderer, CHATML, PLAIN) == theirs(CHATML, PLAIN)


def test_endless_template_is_killed_at_the_deadline_and_the_next_rendering_works():
    renderer = TemplateRenderer(deadline=0.5)
    ours(renderer, "warm", PLAIN)
    first = worker_of(renderer)
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"longer than 0\.5 s"):
        ours(renderer, ENDLESS, PLAIN)
    assert time.monotonic() - start < 30
    assert not runs(first)
    assert ours(renderer, "{{ messages | length }}", PLAIN) == "3"
    renderer.close()


def test_slow_power_in_one_instruction_is_killed_too():
    renderer = TemplateRenderer(deadline=0.5)
    with pytest.raises(ValueError, match=r"longer than 0\.5 s"):
        ours(renderer, "{{ (9 ** (messages | length * 3000000)) % 7 }}", PLAIN)
    renderer.close()


def test_worker_serves_many_renderings_and_comes_back_when_killed(renderer):
    ours(renderer, CHATML, PLAIN)
    first = worker_of(renderer)
    ours(renderer, MISTRAL, PLAIN)
    assert worker_of(renderer) == first
    os.kill(first, 9)
    time.sleep(0.1)
    assert ours(renderer, CHATML, PLAIN) == theirs(CHATML, PLAIN)
    assert worker_of(renderer) != first


def test_message_larger_than_the_pipes_passes_both_ways(renderer):
    messages = [{"role": "user", "content": "ü😀" * 500_000}]
    assert ours(renderer, "{{ messages[0].content }}", messages) == messages[0]["content"]


def test_renderings_from_many_threads_do_not_mix(renderer):
    def one(number):
        return ours(renderer, "{{ messages[0].content }}", [{"role": "user", "content": str(number)}])

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(200))) == [str(number) for number in range(200)]


def test_worker_ends_with_close_and_with_its_renderer():
    renderer = TemplateRenderer()
    ours(renderer, CHATML, PLAIN)
    pid = worker_of(renderer)
    renderer.close()
    renderer.close()
    assert not runs(pid)
    ours(renderer, CHATML, PLAIN)
    pid = worker_of(renderer)
    del renderer
    gc.collect()
    assert not runs(pid)


BUSY = f"""
import threading
threading.Thread(target=render, args=({ENDLESS!r},)).start()
import time; time.sleep(0.2)
"""
KILL = "import os; os.kill(os.getpid(), 9)"


@pytest.mark.parametrize("ending", ["", KILL, BUSY + KILL], ids=["exit", "killed", "killed while it renders"])
def test_worker_ends_with_the_program(ending):
    program = f"""
from strata.text.chat_template import Rendering, TemplateRenderer
renderer = TemplateRenderer(deadline=1.0)
def render(template):
    renderer.render(Rendering.of_chat(template, {PLAIN!r}, special_tokens={{}}))
render("x")
print(renderer._worker._helper.process.pid, flush=True)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid = int(done.stdout)
    deadline = time.monotonic() + 60
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(pid)


def test_worker_sees_no_secrets(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "secret")
    renderer = TemplateRenderer()
    ours(renderer, "x", PLAIN)
    with open(f"/proc/{worker_of(renderer)}/environ") as environment:
        assert "SOME_API_KEY" not in environment.read()
    renderer.close()


def test_the_syntax_is_checked_and_nothing_computed():
    """A process that nobody kills may do it: folding this constant would take 100 GB."""
    check_syntax("{{ 'x' * 10 ** 11 }}")
    with pytest.raises(TemplateSyntaxError):
        check_syntax("{% if %}")
