"""The conformance suite finds each of these faults of a service."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from tinker.proto import tinker_public_pb2 as pb

from rlkit.conformance.probe import ServiceProbe
from rlkit.conformance.report import CheckResult
from rlkit.conformance.suite import CHECKS, Check, open_probe, run_check
from rlkit.engine import EngineServer
from rlkit.testing import byte_model
from tests.engine.tiny_models import write_model
from tests.limits import HANG_S

from .wrong_service import (
    Fault,
    Json,
    WrongService,
    each_input,
    each_logprobs,
    each_sequence,
    in_gradients,
    prompt_logprobs,
    set_field,
)


def _scale_loss(factor: float) -> Callable[[pb.ForwardBackwardOutput], None]:
    def trained(output: pb.ForwardBackwardOutput) -> None:
        output.metrics["loss:sum"] *= factor

    return trained


def _drop_settings(request: pb.ForwardBackwardRequest) -> None:
    request.loss_fn_config.clear()
    request.loss_fn_config_v2.clear()


def _set_loss(name: str, other: str) -> Callable[[pb.ForwardBackwardRequest], None]:
    def train(request: pb.ForwardBackwardRequest) -> None:
        if request.loss_fn == name:
            request.loss_fn = other

    return train


def _drop_input(name: str) -> Callable[[pb.ForwardBackwardRequest], None]:
    def train(request: pb.ForwardBackwardRequest) -> None:
        for datum in request.data:
            datum.loss_fn_inputs.pop(name, None)

    return train


def _keep_first(request: pb.ForwardBackwardRequest) -> None:
    del request.data[1:]


def _backward_always(request: pb.ForwardBackwardRequest) -> None:
    request.forward_only = False


def _reverse_rows(output: pb.ForwardBackwardOutput) -> None:
    for record in output.loss_fn_outputs:
        values = np.frombuffer(record.fields["logprobs"].data, np.float32).reshape(record.num_datums, -1)
        record.fields["logprobs"].data = values[::-1].tobytes()


def _by_arrival() -> Fault:
    """Number the requests of a model as they arrive: nothing waits, and nothing is recognised as sent before."""
    counts = Counter[str]()

    def train(request: pb.ForwardBackwardRequest) -> None:
        counts[request.model_id] += 1
        request.seq_id = counts[request.model_id]

    def request(path: str, body: Json) -> None:
        if "seq_id" in body and "model_id" in body:
            counts[body["model_id"]] += 1
            body["seq_id"] = counts[body["model_id"]]

    return Fault(train=train, request=request)


def _reuse_snapshot() -> Fault:
    sessions = dict[str, str]()

    def answer(path: str, body: Json) -> None:
        if path == "retrieve_future" and body.get("sampling_session_id"):
            body["sampling_session_id"] = sessions.setdefault("first", body["sampling_session_id"])

    return Fault(answer=answer)


def _forget_delivered() -> Fault:
    delivered = set[str]()

    def status(path: str, body: Json) -> int | None:
        if path != "retrieve_future":
            return None
        if body["request_id"] in delivered:
            return 404
        if "#" in body["request_id"]:
            delivered.add(body["request_id"])
        return None

    return Fault(status=status)


def _shorten(path: str, body: Json) -> None:
    if path == "asample":
        params = body["sampling_params"]
        params["max_tokens"] = min(params.get("max_tokens", 8), 64)


def _drop_stop_strings(path: str, body: Json) -> None:
    if path == "asample" and any(isinstance(stop, str) for stop in body["sampling_params"].get("stop") or []):
        body["sampling_params"]["stop"] = []


def _skip_overlapping_steps() -> Fault:
    """Answer an optimiser step after two seconds, and skip the steps of its model that arrive earlier."""
    answer_times = dict[str, float]()

    def holds(path: str, body: Json) -> bool:
        model = str(body.get("request_id")).partition("#")[0]
        return path == "retrieve_future" and time.monotonic() < answer_times.get(model, 0)

    def request(path: str, body: Json) -> None:
        if path == "optim_step":
            if time.monotonic() < answer_times.get(body["model_id"], 0):
                body["adam_params"]["learning_rate"] = 0.0
            answer_times[body["model_id"]] = time.monotonic() + 2

    return Fault(holds=holds, request=request)


def _serve_in_turn(*freeing: str) -> Fault:
    """Spend 40 s on each request of 64 samples, one after another, before any smaller one.

    Args:
        freeing: what ends such a request earlier: `cancel_future`, or silence of its session for 15 s.
    """
    end_times, beats = dict[str, float](), dict[str, float]()

    def is_running(request_id: str) -> bool:
        now, beat = time.monotonic(), beats.get(request_id.partition(":")[0], 0)
        return now < end_times.get(request_id, 0) and not ("silence" in freeing and now > beat + 15)

    def request(path: str, body: Json) -> None:
        if path == "asample" and body["num_samples"] == 64:
            body["sampling_params"]["max_tokens"] = 1  # only the proxy takes the time
        if path == "cancel_future" and path in freeing:
            end_times.pop(body["request_id"], None)
        if path == "session_heartbeat":
            beats[body["session_id"]] = time.monotonic()

    def answer(path: str, body: Json) -> None:
        if path == "asample" and len(body["sample_sequence_ids"]) == 64:
            beats[body["request_id"].partition(":")[0]] = now = time.monotonic()
            end_times[body["request_id"]] = max([now, *end_times.values()]) + 40

    def holds(path: str, body: Json) -> bool:
        if path == "retrieve_future":
            return is_running(body["request_id"])
        return path == "asample" and body["num_samples"] < 64 and any(map(is_running, end_times))

    return Fault(request=request, answer=answer, holds=holds)


def _sample(*names: str, value: object = None) -> Fault:
    return Fault(request=set_field("asample", "sampling_params", *names, value=value))


def _adam(name: str, value: object = None) -> Fault:
    return Fault(request=set_field("optim_step", "adam_params", name, value=value))


def _delete_nothing(path: str, body: Json) -> int | None:
    return 204 if "/checkpoints/" in path and not path.endswith("ttl") else None


def _rename_user(path: str, body: Json) -> None:
    if body.get("category"):
        body["category"] = "server"


def _use_base_model(path: str, body: Json) -> None:
    if path == "create_sampling_session" and body.pop("model_path", None):
        body["base_model"] = "llama"


def _same_ids(path: str, body: Json) -> None:
    if path == "asample" and body.get("sample_sequence_ids"):
        body["sample_sequence_ids"] = ["one"] * len(body["sample_sequence_ids"])


def _drop_model(path: str, body: Json) -> None:
    if path == "get_server_capabilities":
        body["supported_models"] = []


def _swallow_key(key: str) -> Callable[[dict[str, str]], None]:
    def headers(names: dict[str, str]) -> None:
        names["x-api-key"] = key

    return headers


KEY = "tml-key-of-the-test"
RIGHT: dict[Check, CheckResult] = {}
"""Results without a fault."""
FAULTS: dict[str, tuple[Fault, str]] = {
    "negates the loss": (Fault(trained=_scale_loss(-1)), "loss: cross_entropy"),
    "averages two data": (Fault(trained=_scale_loss(0.5)), "loss: ppo"),
    "ignores loss settings": (Fault(train=_drop_settings), "loss: ppo, thresholds"),
    "ignores the thresholds of gspo": (Fault(train=_drop_settings), "loss: gspo, thresholds"),
    "ignores beta": (Fault(train=_drop_settings), "loss: dro, beta"),
    "computes ppo without clipping": (Fault(train=_set_loss("ppo", "importance_sampling")), "loss: ppo"),
    "clips cispo as ppo": (Fault(train=_set_loss("cispo", "ppo")), "gradient: cispo"),
    "lacks gspo": (Fault(train=_set_loss("gspo", "nosuch")), "loss: gspo"),
    "ignores weights": (Fault(train=_drop_input("weights")), "loss: cross_entropy"),
    "flips the gradient": (
        Fault(train=in_gradients(each_input("weights", lambda values: -values))),
        "gradient: size and sign",
    ),
    "doubles the gradient": (
        Fault(train=in_gradients(each_input("weights", lambda values: 2 * values))),
        "gradient: importance_sampling",
    ),
    "ignores negative advantages": (
        Fault(train=in_gradients(each_input("advantages", lambda values: np.maximum(values, 0)))),
        "gradient: importance_sampling",
    ),
    "trains on the first datum only": (Fault(train=in_gradients(_keep_first)), "gradient: sum over data"),
    "leaves a gradient after a forward pass": (Fault(train=_backward_always), "gradient: forward pass leaves none"),
    "reverses a batch": (Fault(trained=_reverse_rows), "loss: large batch"),
    "ignores beta1 and beta2": (
        Fault(request=lambda path, body: [_adam(name).request(path, body) for name in ("beta1", "beta2")]),
        "optimiser: momentum",
    ),
    "ignores weight decay": (_adam("weight_decay"), "optimiser: weight decay"),
    "ignores the clipped norm": (_adam("grad_clip_norm"), "optimiser: clipped norm"),
    "ignores trained layers": (
        Fault(request=lambda path, body: body.get("lora_config", {}).update(train_attn=True, train_mlp=True)),
        "optimiser: trained layers, seed",
    ),
    "shifts the trainer's log-probabilities": (
        Fault(trained=each_logprobs(lambda values: np.roll(values, 1))),
        "samples: log-probabilities by depth",
    ),
    "drops the seed": (_sample("seed"), "samples: seed"),
    "has one seed": (_sample("seed", value=7), "samples: seed"),
    "draws one sample for all": (_sample("temperature", value=0.0), "samples: seed"),
    "ignores the temperature": (_sample("temperature", value=1.0), "samples: distribution"),
    "returns tempered log-probabilities": (
        Fault(sampled=each_sequence(lambda values: values * 0.5)),
        "samples: temperature",
    ),
    "ignores top_k": (_sample("top_k"), "samples: top_k, top_p"),
    "ignores stop": (_sample("stop", value=[]), "samples: stop"),
    "scores the first token of a prompt": (
        Fault(sampled=prompt_logprobs(lambda values: np.nan_to_num(values, nan=-1.0))),
        "samples: prompt_logprobs",
    ),
    "shifts the log-probabilities of a prompt": (
        Fault(sampled=prompt_logprobs(lambda values: np.append(values[:1], np.roll(values[1:], 1)))),
        "samples: prompt_logprobs",
    ),
    "gives all samples one id": (Fault(answer=_same_ids), "samples: seed"),
    "resumes without the optimiser": (
        Fault(request=set_field("load_weights", "optimizer", value=False)),
        "checkpoints: resume with optimiser",
    ),
    "resumes with the optimiser": (
        Fault(request=set_field("load_weights", "optimizer", value=True)),
        "checkpoints: resume without optimiser",
    ),
    "reuses a snapshot": (_reuse_snapshot(), "checkpoints: snapshots"),
    "moves its snapshots": (
        Fault(request=set_field("save_weights_for_sampler", "kind", value="inflight")),
        "checkpoints: snapshots",
    ),
    "freezes in-flight weights": (
        Fault(request=set_field("save_weights_for_sampler", "kind", value="snapshot")),
        "checkpoints: in-flight weights",
    ),
    "deletes nothing": (Fault(status=_delete_nothing), "checkpoints: management"),
    "names another model": (
        Fault(answer=lambda path, body: body.get("model_data", {}).update(model_name="other")),
        "session: get_info",
    ),
    "averages importance_sampling": (Fault(trained=_scale_loss(0.5)), "loss: importance_sampling"),
    "negates cispo": (Fault(trained=_scale_loss(-1)), "loss: cispo"),
    "ignores the thresholds of cispo": (Fault(train=_drop_settings), "loss: cispo, thresholds"),
    "averages dro": (Fault(trained=_scale_loss(0.5)), "loss: dro"),
    "weighs absent weights by a half": (Fault(trained=_scale_loss(0.5)), "loss: optional weights"),
    "doubles soft targets": (Fault(trained=_scale_loss(2)), "loss: soft targets"),
    "ignores weights in gradients": (Fault(train=in_gradients(_drop_input("weights"))), "gradient: cross_entropy"),
    "clips no gradient": (Fault(train=in_gradients(_set_loss("ppo", "importance_sampling"))), "gradient: ppo"),
    "differentiates ppo with default thresholds": (
        Fault(train=in_gradients(_drop_settings)),
        "gradient: ppo, thresholds",
    ),
    "differentiates cispo with default thresholds": (
        Fault(train=in_gradients(_drop_settings)),
        "gradient: cispo, thresholds",
    ),
    "differentiates dro as importance_sampling": (
        Fault(train=in_gradients(_set_loss("dro", "importance_sampling"))),
        "gradient: dro",
    ),
    "differentiates dro with another beta": (Fault(train=in_gradients(_drop_settings)), "gradient: dro, beta"),
    "doubles the gradient of gspo": (
        Fault(train=in_gradients(each_input("advantages", lambda values: 2 * values))),
        "gradient: gspo",
    ),
    "differentiates gspo with default thresholds": (
        Fault(train=in_gradients(_drop_settings)),
        "gradient: gspo, thresholds",
    ),
    "has a large eps": (_adam("eps", 1.0), "optimiser: scale of the gradient"),
    "forgets topk": (
        Fault(sampled=lambda response: [s.ClearField("topk_sampled_logprobs") for s in response.sequences]),
        "samples: topk_logprobs",
    ),
    "forgets targets": (
        Fault(sampled=lambda response: response.ClearField("target_prompt_logprobs")),
        "samples: target_prompt_logprobs",
    ),
    "forgets alternatives": (
        Fault(sampled=lambda response: response.ClearField("prompt_alt_tokens")),
        "samples: prompt_alt_tokens",
    ),
    "samples from the base model": (Fault(request=_use_base_model), "checkpoints: named weights"),
    "runs requests as they arrive": (_by_arrival(), "requests: order of seq_id"),
    "answers twice": (_by_arrival(), "requests: request sent twice"),
    "forgets delivered results": (_forget_delivered(), "requests: future read twice"),
    "blames itself": (Fault(answer=_rename_user), "requests: user error"),
    "shortens samples silently": (Fault(request=_shorten), "requests: context limit"),
    "hides its model": (Fault(answer=_drop_model), "session: capabilities"),
    "ignores negative weights in gradients": (
        Fault(train=in_gradients(each_input("weights", lambda values: np.maximum(values, 0)))),
        "loss: custom loss",
    ),
    "ignores stop strings": (Fault(request=_drop_stop_strings), "samples: stop strings"),
    "skips a step beside another": (_skip_overlapping_steps(), "requests: pipeline"),
    "goes on with cancelled samples": (_serve_in_turn("silence"), "requests: cancellation"),
    "goes on for a killed client": (_serve_in_turn("cancel_future"), "requests: dead client"),
    "accepts any key": (Fault(headers=_swallow_key(KEY)), "session: key"),
}


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WrongService]:
    root = tmp_path_factory.mktemp("conformance")
    folder = write_model(byte_model(root / "llama"))  # with the tokenizer of the byte model
    with (
        EngineServer(
            root=root / "engine", resolve=lambda name: folder, models=["llama"], api_key=KEY, threads=1
        ) as server,
        WrongService(server.url) as wrong,
    ):
        yield wrong


@contextmanager
def _open_probe(wrong: WrongService, *, timeout_s: float = 60) -> Iterator[ServiceProbe]:
    """Open a probe whose start and learning rates are measured without the fault, so that the check has to find it."""
    fault, wrong.fault = wrong.fault, Fault()
    with open_probe(wrong.url, api_key=KEY, model="llama", timeout_s=timeout_s, seed=0, note=print) as probe:
        _ = probe.start_logprobs, probe.adam_rate, probe.sgd_rate, probe.sampler
        wrong.fault = fault
        yield probe
        wrong.fault = Fault()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_service_is_found(wrong: WrongService, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    fault, check_name = FAULTS[name]
    (check,) = [check for check in CHECKS if f"{check.part}: {check.name}" == check_name]
    if check not in RIGHT:
        wrong.fault = Fault()
        with _open_probe(wrong, timeout_s=HANG_S) as probe:  # without a fault, only a hang takes that long
            RIGHT[check] = run_check(probe, check)
    right, wrong.fault = RIGHT[check], fault
    with _open_probe(wrong) as probe:
        result = run_check(probe, check)
    assert right.status == "works", right.detail
    assert result.status in {"deviates", "absent"}, result.detail


@pytest.mark.slow
@pytest.mark.parametrize("check_name", ["cancellation", "dead client"])
def test_a_service_that_ends_unwanted_samples_works(
    wrong: WrongService, check_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    (check,) = [check for check in CHECKS if check.name == check_name]
    wrong.fault = _serve_in_turn("cancel_future", "silence")
    with _open_probe(wrong) as probe:
        result = run_check(probe, check)
    assert result.status == "works", result.detail


def test_each_check_finds_a_fault() -> None:
    assert {f"{check.part}: {check.name}" for check in CHECKS} == {check_name for _, check_name in FAULTS.values()}
