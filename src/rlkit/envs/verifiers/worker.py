# pyright: basic, reportMissingImports=false
# verifiers is installed in the virtual environment of this program only, so its types are unknown here.
"""Program that plays environments of verifiers, run by the Python of their own virtual environment.

Invariant: a model request reaches the policy of its own rollout and no other. A rollout whose run is gone is cancelled.

Requests go to rlkit's endpoint as chat completions, which keeps the exact tokens. verifiers can also send token ids to
`/inference/v1/generate`; it renders prompts then, and this program would need each model's tokenizer and chat format.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import suppress
from functools import partial
from itertools import count

from verifiers.v1.clients import EvalClient, EvalClientConfig, ModelContext, resolve_client
from verifiers.v1.clients.client import RelayReply
from verifiers.v1.configs.select import SelectConfig
from verifiers.v1.errors import ProviderError
from verifiers.v1.interception import server as interception
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

POLICY = EvalClientConfig(base_url="http://policy/v1", api_key_var="RLKIT_POLICY_API_KEY")
"""Client of the seats that the policy plays."""

LIMITS = {"context_length_exceeded": "max_total_tokens", "rollout_limit_reached": "max_turns"}
"""verifiers' names of the limits of a rollout, by rlkit's codes."""

REQUEST_BYTES = 64 << 20
ERROR_CHARS = 2000


class Policies(EvalClient):
    """The client of all rollouts, because verifiers keeps each client until it ends.

    A request has the number of its rollout as its model.
    """

    def __init__(self, config):
        super().__init__(config)
        self.rollouts = {}
        """Address, key and slot of each running rollout."""

    async def relay(self, dialect, body, session_id=None, headers=None):
        """Ask for a whole reply and stream it, because an error inside a stream has no status."""
        whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        response = await self.get_response(dialect, whole, None, session_id, headers=headers)

        async def stream():
            for event in dialect.stream_events(response.raw):
                yield event

        return RelayReply("text/event-stream", stream(), partial(asyncio.sleep, 0))

    async def _request(self, url, body, headers, *, stream=False):
        endpoint, key, slot = self.rollouts[body["model"]]
        headers["authorization"] = f"Bearer {key}"
        try:
            return await super()._request(url.replace(POLICY.base_url, endpoint), body, headers, stream=stream)
        except ProviderError as error:
            for limit in [name for code, name in LIMITS.items() if code in str(error)]:
                for trace in slot.traces:
                    trace.stop(limit)  # verifiers scores the episode, as at a limit of its own
            raise


def make_report(episode):
    """Return the arguments of the episode's Outcome, or the error of an episode that was not scored."""
    if not episode.ok:
        errors = [*(error for trace in episode.traces if not trace.ok for error in trace.errors), *episode.errors]
        return f"{errors[-1].type}: {errors[-1].message[:ERROR_CHARS]}"
    traces = [trace for trace in episode.traces if trace.agent.config.client == POLICY]
    if len(traces) != 1:
        return f"SeatError: the policy played {len(traces)} conversations, and rlkit trains one"
    (trace,) = traces
    ending = trace.stop_condition
    if not trace.rewards or None in trace.rewards.values() or (trace.is_timeout and ending != "agent_timeout"):
        return f"ScoringError: the task was not scored: {ending}"
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    scores = {name: reward.score for name, reward in trace.rewards.items()}
    truncated = trace.is_truncated or trace.is_timeout
    return {"reward": trace.reward, "metrics": metrics | scores, "truncated": truncated, "info": {"ended": ending}}


async def serve(env, number):
    """Play a task for each connection at the socket of this number, until the end of the standard input."""
    policies, numbers, task_class = Policies(POLICY), count(), type(env.taskset).task_type()
    interception.resolve_client = lambda config: policies if config == POLICY else resolve_client(config)

    async def play(request):
        data = task_class.data_type().model_validate(request["task"])
        (slot,) = env.slots(task_class(data, env.config.taskset.task))
        name = str(next(numbers))
        policies.rollouts[name] = request["url"], request["key"], slot
        try:
            return make_report(await env.run_slot(slot, ModelContext(model=name, client=POLICY)))
        except Exception as error:  # the record of the episode names it
            return f"{type(error).__name__}: {str(error)[:ERROR_CHARS]}"
        finally:
            del policies.rollouts[name]

    async def answer(reader, writer):
        playing = asyncio.create_task(play(json.loads(await reader.readline())))
        departure = asyncio.create_task(reader.read())
        await asyncio.wait([playing, departure], return_when=asyncio.FIRST_COMPLETED)
        departure.cancel()
        playing.cancel()  # without effect on a finished one
        with suppress(asyncio.CancelledError, ConnectionError):
            writer.write(json.dumps(await playing).encode() + b"\n")
            await writer.drain()
        writer.close()

    async with env.serving():
        listener = socket.socket(fileno=int(number))
        server = await asyncio.start_unix_server(answer, sock=listener, limit=REQUEST_BYTES, backlog=socket.SOMAXCONN)
        await asyncio.to_thread(sys.stdin.read)
        server.close()  # without waiting for its rollouts, which end with the event loop


def print_tasks(env, select):
    """Print the selected tasks as the last line."""
    tasks = env.taskset.select(SelectConfig.model_validate_json(select))
    if not tasks.bounded:
        raise ValueError("the tasks have no end: set limit")
    rows = [{"id": task.data.id, "data": task.data.model_dump(mode="json", exclude_none=True)} for task in tasks]
    print(json.dumps(rows))


def main(command, config, *arguments):
    """Run `serve CONFIG SOCKET`, or `list CONFIG SELECTION`, whose errors are the user's."""
    fields = "id, config or taskset"
    try:
        env = load_environment(resolve_env_config(json.loads(config)))
        if command == "list":
            fields = "select"
            return print_tasks(env, *arguments)
    except Exception as error:
        sys.exit(f"{fields}: {type(error).__name__}: {error}")
    asyncio.run(serve(env, *arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
