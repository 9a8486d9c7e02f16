"""Each setting says what its values name outside of llamasup: a config over the API may not change those."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from llamasup.core.config.config_keys import keys_of
from llamasup.core.settings.declaration import Setting, settings_of
from llamasup.core.settings.kinds import Named, Section
from llamasup.features import FEATURES, config_keys

# Of ``defaults`` only the keys, which ``models`` has too. A new setting belongs into one of these lists.
EXPECTED = {
    "program": "runtime.path",
    "path": """
        listen models_dir follow_links caches auth.api_key_file http.tls_cert http.tls_key http.access_log
        ollama.listen
        downloads.folder downloads.token_file batches.folder peers.key_file peers.ca_file fleet.key_file
        models.path models.draft_model models.mmproj models.loras models.rpc_ca models.rpc_cert models.rpc_key
    """,
    "host": """
        http.remote_media http.trusted_proxies downloads.endpoint downloads.private_addresses peers.url
        fleet.directory fleet.ray models.rpc
    """,
    "flags": "models.extra",
    "rights": "auth.insecure_no_auth http.api_config router.inference_keys",
    "nothing": """
        runtime.watch memory.ram memory.vram max_loaded default_model swap_after groups watch
        models.ctx_size models.parallel models.gpu_layers models.threads models.kv_type models.flash_attn
        models.profile models.devices models.nice models.check_memory models.warm_up models.ttl models.pin
        models.preload models.replicas models.keep_slots models.max_concurrent models.max_queued
        models.wait_timeout models.continue_streams models.repair models.drain_timeout models.repo models.url
        models.aliases virtual_models.model virtual_models.any virtual_models.set virtual_models.default
        virtual_models.remove virtual_models.system http.allow_hosts http.allow_origins http.max_body
        http.stream_keepalive
        http.request_timeout http.slow_request http.ui downloads.on_demand downloads.parallel slots.keep
        slots.disk usage.enabled usage.keep_days batches.enabled batches.max_file batches.disk
        batches.max_files batches.max_lines batches.max_batches batches.keep_days batches.only_between
        fleet.name fleet.listen fleet.ingress fleet.min_replicas fleet.max_replicas fleet.gpus
        fleet.target_load fleet.upscale_after fleet.downscale_after fleet.idle_after fleet.when_idle
        fleet.drain_timeout fleet.surge fleet.models.min_replicas fleet.models.max_replicas fleet.models.cpus
        fleet.models.gpus fleet.models.memory fleet.models.when_idle router.props
    """,
}


# Of the feature command, which extends an entry of ``models``.
COMMAND = {
    "program": "models.command models.stop",
    "flags": "models.environment",
    "rights": "models.routes",
    "nothing": """
        models.health.path models.health.status models.memory.ram models.memory.vram
        models.warmup.path models.warmup.body
    """,
}


def all_settings(keys: Mapping[str, tuple[str, Setting]], at: str = "") -> Iterator[tuple[str, Setting]]:
    for key, (_, setting) in keys.items():
        kind = setting.kind.of if isinstance(setting.kind, Named) else setting.kind
        if isinstance(kind, Section):
            yield from all_settings(settings_of(kind.keys), f"{at}{key}.")
        else:
            yield f"{at}{key}", setting


def test_every_setting_says_what_its_values_name() -> None:
    found = defaultdict(set)
    top = keys_of(config_keys())
    for key, setting in all_settings(top):
        found[setting.outside].add(key.replace("defaults.", "models."))
    # A section may be that of a feature that was deleted.
    has_commands = any(feature.name == "command" for feature in FEATURES)
    lists = (EXPECTED, COMMAND) if has_commands else (EXPECTED,)
    expected = {(names, key) for each in lists for names, keys in each.items() for key in keys.split()}
    here = {(names, key) for names, key in expected if key.partition(".")[0] in top}
    assert here == {(names, key) for names, keys in found.items() for key in keys}
