"""The helper process as an event loop asks it: in order, in time, without ever waiting for a pipe."""

import asyncio
import os
import signal
import time
from contextlib import asynccontextmanager
from math import ceil

import pytest
import uvloop

from strata.text.chat_template import AsyncTemplateRenderer, Rendering

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ECHO = "{{ messages[0].content }}"
# Some hundredths of a second, so that others wait behind it.
SLOW = "{% for a in range(99999) %}{% endfor %}{% for a in range(99999) %}{% endfor %}" * 6


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"], autouse=True)
def loop_factory(request):
    return request.param


@asynccontextmanager
async def using(deadline=10.0):
    """A renderer, of which no process is left afterwards."""
    renderer = AsyncTemplateRenderer(deadline)
    try:
        yield renderer
    finally:
        helper = renderer._worker._helper
        renderer.close()
        renderer.close()
        assert helper is None or helper.process.wait(60) == -signal.SIGKILL


class TextRendering(Rendering):
    def text(self, reply):
        return super().text(reply).text


def rendering(template, content="Hello"):
    return TextRendering.of_chat(template, [{"role": "user", "content": content}], special_tokens={})


def pid_of(renderer):
    return renderer._worker._helper.process.pid


async def test_many_at_once_get_their_own_answers_in_order():
    async with using() as renderer:
        ended = []

        async def one(number):
            text = await renderer.render(rendering(ECHO, f"{number} " * (number % 7) * 300))
            ended.append(number)
            return text

        texts = await asyncio.gather(*map(one, range(500)))
        assert texts == [f"{number} " * (number % 7) * 300 for number in range(500)]
        assert ended == list(range(500))


async def test_only_what_is_too_slow_fails_and_what_waits_behind_it_is_rendered():
    async with using(deadline=0.5) as renderer:
        await renderer.render(rendering("warm"))
        first = pid_of(renderer)
        start = time.monotonic()
        found = await asyncio.gather(
            renderer.render(rendering(ECHO, "before")),
            renderer.render(rendering(ENDLESS)),
            renderer.render(rendering(ECHO, "behind")),
            renderer.render(rendering(ENDLESS)),
            *(renderer.render(rendering(ECHO, "x" * 50_000 + str(number))) for number in range(20)),
            return_exceptions=True,
        )
        assert time.monotonic() - start < 30
        assert found[0] == "before"
        assert found[2] == "behind"
        assert found[4:] == ["x" * 50_000 + str(number) for number in range(20)]
        for error in (found[1], found[3]):
            assert str(error) == "the model's chat template failed: it ran longer than 0.5 s"
        assert pid_of(renderer) != first


async def test_time_spent_behind_others_does_not_count():
    async with using(deadline=1.5) as renderer:
        shortest = 1.5
        for _ in range(5):
            start = time.monotonic()
            await renderer.render(rendering(SLOW))
            shortest = min(shortest, time.monotonic() - start)
        many = ceil(2 * 1.5 / shortest)
        start = time.monotonic()
        await asyncio.gather(*(renderer.render(rendering(SLOW)) for _ in range(many)))
        assert time.monotonic() - start > 1.5


async def test_an_answer_that_came_while_the_loop_was_busy_is_in_time():
    async with using(deadline=1.0) as renderer:
        await renderer.render(rendering("warm"))
        asked = asyncio.create_task(renderer.render(rendering(ECHO, "there")))
        await asyncio.sleep(0)
        time.sleep(1.5)
        assert await asked == "there"


async def test_a_worker_that_is_killed_while_it_renders_fails_that_and_nothing_else():
    async with using() as renderer:
        await renderer.render(rendering("warm"))
        at, *behind = (
            asyncio.create_task(renderer.render(rendering(template, "behind"))) for template in (ENDLESS, ECHO, ECHO)
        )
        await asyncio.sleep(0.1)
        os.kill(pid_of(renderer), signal.SIGKILL)
        with pytest.raises(ValueError, match="chat template failed: its process died"):
            await at
        assert await asyncio.gather(*behind) == ["behind", "behind"]


async def test_a_worker_that_is_killed_at_rest_fails_nothing():
    async with using() as renderer:
        await renderer.render(rendering("warm"))
        for pause in (0.1, 0.0):  # until the program has noticed, and not at all
            os.kill(pid_of(renderer), signal.SIGKILL)
            os.waitid(os.P_PID, pid_of(renderer), os.WEXITED | os.WNOWAIT)
            await asyncio.sleep(pause)
            assert await renderer.render(rendering(ECHO, "again")) == "again"


async def test_cancelled_ones_leave_the_others_their_answers():
    async with using() as renderer:
        await renderer.render(rendering("warm"))
        os.kill(pid_of(renderer), signal.SIGSTOP)
        tasks = [
            asyncio.create_task(renderer.render(rendering(ECHO, "x" * 30_000 + str(number)))) for number in range(12)
        ]
        await asyncio.sleep(0.05)
        for number in (0, 1, 3, 10):  # in the pipe, behind it there, waiting with or without a part in the pipe
            tasks[number].cancel()
        os.kill(pid_of(renderer), signal.SIGCONT)
        found = await asyncio.gather(*tasks, return_exceptions=True)
        for number, text in enumerate(found):
            if number in (0, 1, 3, 10):
                assert isinstance(text, asyncio.CancelledError)
            else:
                assert text == "x" * 30_000 + str(number)


async def test_two_megabytes_pass_both_ways_while_the_loop_goes_on():
    content = "ü" * 1_000_000  # in JSON six bytes each
    async with using() as renderer:
        await renderer.render(rendering("warm"))
        start = time.perf_counter()
        os.kill(pid_of(renderer), signal.SIGSTOP)  # so that the pipe is full for a while
        asked = asyncio.ensure_future(renderer.render(rendering(ECHO, content)))
        asyncio.get_running_loop().call_later(1.5, os.kill, pid_of(renderer), signal.SIGCONT)
        # The loop itself lets the worker go on: had it waited for the pipe, this would never end.
        assert await asyncio.wait_for(asked, 60) == content
        assert time.perf_counter() - start >= 1.5


async def test_a_fault_of_the_template_and_a_chat_that_is_no_json_are_told():
    async with using() as renderer:
        with pytest.raises(ValueError, match="chat template failed: not so"):
            await renderer.render(rendering("{{ raise_exception('not so') }}"))
        strange = {"role": "user", "content": "x", "name": object()}
        with pytest.raises(ValueError, match="plain JSON values"):
            await renderer.render(TextRendering.of_chat(ECHO, [strange], special_tokens={}))
        assert await renderer.render(rendering(ECHO)) == "Hello"


async def test_what_waits_at_the_end_is_told():
    async with using() as renderer:
        await renderer.render(rendering("warm"))
        asked = [asyncio.create_task(renderer.render(rendering(template))) for template in (ENDLESS, ECHO)]
        await asyncio.sleep(0.05)
        renderer.close()
        for one in asked:
            with pytest.raises(ValueError, match="it was ended"):
                await one
        assert await renderer.render(rendering(ECHO)) == "Hello"


async def test_a_worker_that_cannot_start_is_told_to_all(monkeypatch):
    async with using() as renderer:
        monkeypatch.setattr(renderer._worker, "_module", "strata.no_such_module")
        found = await asyncio.gather(*(renderer.render(rendering(ECHO)) for _ in range(3)), return_exceptions=True)
        assert all(isinstance(one, RuntimeError) and "did not start" in str(one) for one in found)
