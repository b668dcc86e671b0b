"""The management routes as the SDK's RestClient and the cookbook's download see them."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from tinker.lib.public_interfaces.admin_client import AdminClient

from rlkit.engine import EngineServer
from rlkit.engine.storage import checkpoints, session_records
from rlkit.engine.storage.checkpoints import CheckpointStore
from rlkit.errors import MissingError
from tests.limits import HANG_S

from .conftest import connect
from .helpers import ce_datum, prompt

TEXT = [72, 101, 108, 108, 111, 44, 32]
ADAM = types.AdamParams(learning_rate=1e-2)


@pytest.fixture
def trainer(client: tinker.ServiceClient) -> tinker.TrainingClient:
    return trained(client, "qwen3", user_metadata={"purpose": "test"})


def trained(client: tinker.ServiceClient, base: str, **options: object) -> tinker.TrainingClient:
    trainer = client.create_lora_training_client(base_model=base, rank=4, seed=1, **options).result()  # type: ignore[arg-type]  passed through
    trainer.forward_backward([ce_datum(TEXT)], "cross_entropy")
    trainer.optim_step(ADAM).result()
    return trainer


def test_runs_and_checkpoints_are_listed_as_saved(trainer: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    before = time.time()
    state = trainer.save_state("state", ttl_seconds=7200, user_metadata={"step": "1"}).result().path
    sampler = trainer.save_weights_for_sampler("sampler", user_metadata={"step": "2"}).result().path
    run = rest.get_training_run(trainer.model_id).result()
    assert run == rest.get_training_run_by_tinker_path(sampler).result()
    assert (run.training_run_id, run.base_model, run.is_lora, run.lora_rank) == (trainer.model_id, "qwen3", True, 4)
    assert run.user_metadata == {"purpose": "test"}
    listed = {c.tinker_path: c for c in rest.list_checkpoints(trainer.model_id).result().checkpoints}
    assert listed == {state: run.last_checkpoint, sampler: run.last_sampler_checkpoint}
    state_checkpoint, sampler_checkpoint = listed[state], listed[sampler]
    assert (state_checkpoint.checkpoint_id, state_checkpoint.checkpoint_type) == ("weights/state", "training")
    assert (sampler_checkpoint.checkpoint_id, sampler_checkpoint.checkpoint_type) == (
        "sampler_weights/sampler",
        "sampler",
    )
    assert (state_checkpoint.user_metadata, sampler_checkpoint.user_metadata) == ({"step": "1"}, {"step": "2"})
    assert state_checkpoint.expires_at is not None
    assert state_checkpoint.expires_at.timestamp() == pytest.approx(before + 7200, abs=60)
    assert sampler_checkpoint.expires_at is None
    assert state_checkpoint.size_bytes is not None
    assert sampler_checkpoint.size_bytes is not None
    assert state_checkpoint.size_bytes > 2 * sampler_checkpoint.size_bytes > 0


def test_lists_come_in_pages_newest_first(trainer: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    paths = [trainer.save_state(f"page{i}").result().path for i in range(3)]
    whole = rest.list_user_checkpoints().result()
    assert [c.tinker_path for c in whole.checkpoints[:3]] == paths[::-1]
    assert whole.cursor is not None
    assert whole.cursor.total_count == len(whole.checkpoints)
    page = rest.list_user_checkpoints(limit=2, offset=1).result()
    assert page.checkpoints == whole.checkpoints[1:3]
    assert page.cursor is not None
    assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (1, 2, whole.cursor.total_count)
    runs = rest.list_training_runs(limit=1).result()
    assert [run.training_run_id for run in runs.training_runs] == [trainer.model_id]
    assert rest.list_training_runs(limit=10, offset=runs.cursor.total_count).result().training_runs == []
    with pytest.raises(tinker.BadRequestError, match="limit must be a whole number"):
        rest.list_user_checkpoints(limit=-1).result()


def test_a_query_for_one_session_or_run_reads_no_others(
    trainer: tinker.TrainingClient,
    rest: tinker.RestClient,
    client: tinker.ServiceClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = trainer.save_state("state").result().path
    newer = trained(client, "llama").save_state("state").result().path
    read_paths: list[Path] = []
    for module, name in ((session_records, "read_json"), (checkpoints, "_decode")):
        real = getattr(module, name)

        def record_read(*arguments: object, real: Callable[..., object] = real) -> object:
            read_paths.extend(path for path in arguments if isinstance(path, Path))
            return real(*arguments)

        monkeypatch.setattr(module, name, record_read)

    def folders() -> set[str]:
        folder_names = {part for path in read_paths for part in path.parts if "_train_" in part}
        read_paths.clear()
        return folder_names

    older_run, newer_run = (path.split("/")[2].replace(":", "_") for path in (older, newer))
    session_id = trainer.model_id.partition(":")[0]
    assert len(rest.get_session(session_id).result().training_run_ids) == 2
    assert {path.stem for path in read_paths if path.parent.name == ".sessions"} == {session_id}
    assert folders() == {older_run, newer_run}
    rest.get_training_run(trainer.model_id).result()
    assert folders() == {older_run}
    rest.list_training_runs(limit=1).result()
    assert {path.parent.parent.parent.name for path in read_paths if path.name == "checkpoint.json"} == {newer_run}


def test_a_checkpoint_can_be_deleted_published_and_given_a_lifetime(
    trainer: tinker.TrainingClient, rest: tinker.RestClient
) -> None:
    path = trainer.save_state("a").result().path

    def get_checkpoint() -> types.Checkpoint:
        return next(c for c in rest.list_checkpoints(trainer.model_id).result().checkpoints if c.tinker_path == path)

    rest.publish_checkpoint_from_tinker_path(path).result()
    assert get_checkpoint().public
    rest.unpublish_checkpoint_from_tinker_path(path).result()
    assert not get_checkpoint().public
    rest.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert get_checkpoint().expires_at is not None
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert get_checkpoint().expires_at is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds must be 3600"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert rest.list_checkpoints(trainer.model_id).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
        rest.delete_checkpoint(trainer.model_id, "weights/a").result()


def test_a_lifetime_out_of_bounds_fails_the_save(trainer: tinker.TrainingClient) -> None:
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds must be 3600"):
        trainer.save_state("short", ttl_seconds=60).result()


def test_an_expired_checkpoint_cannot_be_used(resolve: Callable[[str], Path], tmp_path: Path) -> None:
    with EngineServer(root=tmp_path, resolve=resolve) as server, connect(server) as client:
        rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)
        trainer = trained(client, "llama")
        path = trainer.save_weights_for_sampler("s").result().path
        sampler = client.create_sampling_client(model_path=path).result()
        sampler.sample(prompt(*TEXT), 1, types.SamplingParams(max_tokens=1)).result()
        CheckpointStore(tmp_path, clock=lambda: time.time() - 7200).set_ttl(path, 3600)
        with pytest.raises(tinker.NotFoundError, match="has expired"):
            rest.get_weights_info_by_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError, match="has expired"):
            sampler.sample(prompt(*TEXT), 1, types.SamplingParams(max_tokens=1)).result()
        with pytest.raises(tinker.RequestFailedError, match="has expired"):
            client.create_training_client_from_state(path).result()
        assert rest.list_user_checkpoints().result().checkpoints == []
        assert not list(tmp_path.glob("*/sampler_weights/*"))
        with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
            client.create_sampling_client(model_path=path).result()


def test_records_survive_a_restart(resolve: Callable[[str], Path], tmp_path: Path) -> None:
    def list_everything(rest: tinker.RestClient) -> tuple[object, ...]:
        runs = rest.list_training_runs().result()
        sessions = rest.list_sessions().result()
        session = rest.get_session(sessions.sessions[0]).result()
        return runs, sessions, session.training_run_ids, session.user_metadata, session.display_name

    with EngineServer(root=tmp_path, resolve=resolve) as server:
        options = {"base_url": server.url, "api_key": server.api_key}
        with tinker.ServiceClient({"team": "a"}, display_name="Nightly run", **options) as client:
            trainer = trained(client, "llama", user_metadata={"n": 3})
            path = trainer.save_state("state").result().path
            rest = tinker.RestClient(**options)
            before = list_everything(rest)
            session_id = trainer.model_id.split(":")[0]
            sampler_id = trainer.save_weights_and_get_sampling_client().result().get_sampler_handle()
            assert rest.get_session(session_id).result().sampler_ids
            assert sampler_id
    with EngineServer(root=tmp_path, resolve=resolve) as server:
        rest = tinker.RestClient(base_url=server.url, api_key=server.api_key)
        assert list_everything(rest) == before
        assert rest.get_training_run_by_tinker_path(path).result().user_metadata == {"n": "3"}
        session = rest.get_session(session_id).result()
        assert (session.user_metadata, session.display_name) == ({"team": "a"}, "Nightly run")
        assert (session.training_run_ids, session.sampler_ids) == ([trainer.model_id], [])
        with pytest.raises(tinker.NotFoundError, match="no session"):
            rest.get_session("other").result()


@pytest.mark.filterwarnings("ignore:.*search_sessions is experimental")
def test_sessions_are_found_by_name_metadata_and_page(resolve: Callable[[str], Path], tmp_path: Path) -> None:
    with EngineServer(root=tmp_path, resolve=resolve) as server:
        options = {"base_url": server.url, "api_key": server.api_key}
        rest = tinker.RestClient(**options)

        def search(**fields: object) -> list[str | None]:
            request = types.SessionSearchRequest.model_validate(fields)
            names: list[str | None] = []
            while True:
                page = rest.search_sessions(request).result()
                names += [session.display_name for session in page.sessions]
                if page.next_cursor is None:
                    return names
                request = request.model_copy(update={"cursor": page.next_cursor})

        for name in ("Alpha one", "Alpha two"):
            with tinker.ServiceClient({"name": name}, display_name=name, **options) as client:
                trained(client, "llama")
        with tinker.ServiceClient({}, display_name="Beta", **options) as client:
            trained(client, "llama")
            assert search(limit=1) == ["Beta", "Alpha two", "Alpha one"]
            assert search(display_name="one ALPHA") == ["Alpha one"]
            assert search(user_metadata={"name": "Alpha two"}) == ["Alpha two"]
            assert search(statuses=[{"type": "active"}]) == ["Beta"]
            assert search(project_ids=["other"]) == []


def test_a_copy_belongs_to_a_new_run(trainer: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = trainer.save_weights_for_sampler("copied").result().path
    copy = rest.copy_weights(path, "any-project", ttl_seconds=3600).result()
    assert copy != path
    assert copy.endswith("/sampler_weights/copied")
    run = rest.get_training_run_by_tinker_path(copy).result()
    assert (run.base_model, run.lora_rank) == ("qwen3", 4)
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.expires_at is not None
    with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
        rest.copy_weights(f"{path}x", "any-project").result()


def test_samplers_and_storage_are_listed(
    trainer: tinker.TrainingClient, rest: tinker.RestClient, client: tinker.ServiceClient, server: EngineServer
) -> None:
    path = trainer.save_weights_for_sampler("told").result().path
    client.create_sampling_client(model_path=path).result()
    session_id = trainer.model_id.split(":")[0]
    samplers = [rest.get_sampler(i).result() for i in rest.get_session(session_id).result().sampler_ids]
    assert [(sampler.base_model, sampler.model_path) for sampler in samplers] == [("qwen3", path)]
    admin = AdminClient(base_url=server.url, api_key=server.api_key)
    (usage,) = admin.get_current_checkpoint_storage_usage().result().data
    listed = rest.list_user_checkpoints(limit=1000).result().checkpoints
    assert usage.checkpoint_count == len(listed)
    assert usage.size_bytes == sum(checkpoint.size_bytes or 0 for checkpoint in listed)


def test_requests_without_meaning_on_one_machine_are_rejected_by_name(
    rest: tinker.RestClient, server: EngineServer
) -> None:
    admin = AdminClient(base_url=server.url, api_key=server.api_key)
    for route, ask in (
        ("sessions/s/project", lambda: rest.assign_session_project("s", "p")),
        ("sessions/s/trace_export", lambda: rest.export_session_trace("s")),
        ("billing/usage/events", lambda: admin.get_billing_usage("2026-01-01", "2026-01-02")),
        ("audit", lambda: admin.get_audit_log("all")),
    ):
        with pytest.raises(tinker.NotFoundError, match=f"{route} is not offered by the embedded engine"):
            ask().result()


@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`"
)  # it adapts the output alone, as training did
@pytest.mark.parametrize("base", ["llama", "qwen2", "qwen3"])  # the head of the first is tied to its embedding
def test_peft_reads_a_downloaded_adapter_as_it_was_trained(
    client: tinker.ServiceClient, rest: tinker.RestClient, models: Mapping[str, Path], tmp_path: Path, base: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def logprobs(model: torch.nn.Module) -> list[float]:
        with torch.inference_mode():
            rows = model(torch.tensor([TEXT])).logits[0, :-1].log_softmax(-1)
        return rows.gather(-1, torch.tensor(TEXT[1:])[:, None])[:, 0].tolist()

    trainer = trained(client, base)
    fetch(rest, trainer.save_weights_external("export").result().path, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(models[base], dtype=torch.float32)
    sampler = trainer.save_weights_and_get_sampling_client().result()
    expected = sampler.compute_logprobs(prompt(*TEXT)).result()[1:]
    assert logprobs(model) != pytest.approx(expected, abs=1e-2)
    adapted = PeftModel.from_pretrained(model, tmp_path)
    assert logprobs(adapted) == pytest.approx(expected, abs=1e-4)
    assert adapted.peft_config["default"].base_model_name_or_path == base


def fetch(rest: tinker.RestClient, path: str, folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for name, url in rest.get_external_weights_urls(path).result().urls.items():
        files[name] = folder / name
        urllib.request.urlretrieve(url, files[name])
    return files


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the cookbook calls what the SDK deprecates
def test_the_cookbook_downloads_a_training_state_encrypted_and_reads_it(
    trainer: tinker.TrainingClient,
    rest: tinker.RestClient,
    server: EngineServer,
    models: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tinker_cookbook import weights

    monkeypatch.setenv("TINKER_API_KEY", server.api_key)
    path = trainer.save_state("state").result().path
    weights.download(tinker_path=path, output_dir=str(tmp_path / "state"), base_url=server.url)
    external = trainer.save_weights_external("export", ttl_seconds=3600).result().path
    weights.download(tinker_path=external, output_dir=str(tmp_path / "export"), base_url=server.url)
    state_tensors, export_tensors = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("state", "export")
    )
    assert state_tensors.keys() == export_tensors.keys()
    assert all(bool((state_tensors[key] == export_tensors[key]).all()) for key in state_tensors)
    assert [c.checkpoint_id for c in rest.list_checkpoints(trainer.model_id).result().checkpoints] == [
        "external_weights/export",
        "weights/state",
    ]
    weights.build_lora_adapter(
        base_model=str(models["qwen3"]), adapter_path=str(tmp_path / "state"), output_path=str(tmp_path / "served")
    )
    served = load_file(tmp_path / "served" / "adapter_model.safetensors")
    assert len(served) == len(state_tensors)


def test_an_encrypted_export_needs_real_keys(trainer: tinker.TrainingClient) -> None:
    for keys in (["age1nonsense"], ["key"], ["age1"] * 11):
        with pytest.raises(tinker.RequestFailedError, match="age_encryption_recipients"):
            trainer.save_weights_external("export", age_encryption_recipients=keys).result()


def test_a_download_url_serves_only_its_file(trainer: tinker.TrainingClient, rest: tinker.RestClient) -> None:
    path = trainer.save_weights_external("export").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    assert set(urls) == {"adapter_config.json", "adapter_model.safetensors"}
    url = urls["adapter_config.json"]
    signature = urlsplit(url).path.split("/")[4]
    for wrong in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("adapter_config.json", "..%2Fcheckpoint.json"),
        url.replace(signature, "0" * len(signature)),
        url.replace(signature, "%C3%A9"),
        url.replace("/external_weights/", "/weights/"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(wrong)
        with refused.value as answer:
            assert answer.code in {400, 404}
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(urllib.error.HTTPError, match="404") as error:
        urllib.request.urlopen(url)
    error.value.close()


def test_external_weights_are_not_trained_on(client: tinker.ServiceClient, trainer: tinker.TrainingClient) -> None:
    path = trainer.save_weights_external("export").result().path
    with pytest.raises(tinker.RequestFailedError, match="external weights can only be downloaded"):
        client.create_training_client_from_state(path).result()


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "POST"])
@pytest.mark.parametrize(
    "path",
    [
        "training_runs/..",
        "training_runs/%2e%2e%2f%2e%2e",
        "training_runs/*:train:0",
        "training_runs/a:train:0%00",
        "training_runs/..%2f..%2fetc/checkpoints/weights/passwd",
        "training_runs/a:train:0/checkpoints/weights/..",
        "training_runs/a:train:0/checkpoints/%2e%2e/%2e%2e",
        "training_runs/a:train:0/checkpoints/weights/%00",
        "training_runs/a:train:0/checkpoints/weights/%2fetc%2fpasswd",
        "training_runs/a:train:0/checkpoints/weights/%2e%2e/ttl",
        "training_runs/a:train:0/checkpoints/weights/%2e%2e/publish",
        "training_runs/a:train:0/checkpoints/weights/%ff%fe/external_weights_urls",
        "sessions/..%2f..%2fx",
        "sessions/%00",
        "checkpoints?limit=-1",
        "checkpoints?offset=1e9",
        "downloads/x/99999999999999999999/a:train:0/external_weights/a/b",
        "downloads/x/1/..%2f/external_weights/a/b",
    ],
)
def test_no_path_escapes_the_store_or_breaks_the_server(server: EngineServer, method: str, path: str) -> None:
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=HANG_S)
    headers = {"X-API-Key": server.api_key, "Content-Type": "application/json"}
    body = '{"ttl_seconds": null}' if method in {"PUT", "POST"} else None
    connection.request(method, f"/api/v1/{path}", body=body, headers=headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status in {400, 404, 405, 422}


def test_management_needs_the_key(server: EngineServer) -> None:
    for path in ("training_runs", "checkpoints", "sessions", "billing/usage/checkpoints/current"):
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(f"{server.url}/api/v1/{path}")
        refused.value.close()


def test_a_missing_run_is_named(rest: tinker.RestClient) -> None:
    with pytest.raises(tinker.NotFoundError, match="no training run 'a:train:0'"):
        rest.get_training_run("a:train:0").result()


def test_a_store_without_a_root_is_empty(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "none")
    assert (store.checkpoints(), store.records.runs(), store.records.sessions()) == ([], [], [])
    with pytest.raises(MissingError, match="no such checkpoint"):
        store.get("tinker://a:train:0/weights/a")
