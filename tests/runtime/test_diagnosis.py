"""What is said of each kind of store, from what such a store answers."""

import pytest

from asyncrl.runtime import diagnosis

GIB = 1 << 30

LOG = {"aof_enabled": 1, "aof_last_write_status": "ok", "rdb_last_bgsave_status": "ok"}
NO_LOG = {**LOG, "aof_enabled": 0}
EVERYSEC = {"appendfsync": "everysec", "no-appendfsync-on-rewrite": "no", "save": ""}


@pytest.mark.parametrize(
    ("info", "config", "level", "says"),
    [
        (LOG, EVERYSEC, "ok", "appendfsync everysec: up to about 1 s after a power cut; nothing after kill -9"),
        (LOG, {**EVERYSEC, "appendfsync": "always"}, "ok", "appendfsync always: nothing"),
        (LOG, {**EVERYSEC, "appendfsync": "no"}, "warning", "up to about 30 s after a power cut"),
        (LOG, {**EVERYSEC, "no-appendfsync-on-rewrite": "yes"}, "warning", "not during rewrites"),
        (LOG, None, "warning", "how often it is synced cannot be read (CONFIG is not allowed)"),
        (LOG, {}, "warning", "how often it is synced cannot be read (CONFIG is not allowed)"),
        (NO_LOG, {"save": "300 1"}, "warning", "snapshots only, every 300 s: up to 300 s"),
        (NO_LOG, {"save": "3600 1 300 100 60 10000"}, "warning", "every 300 s with 100 writes, every 60 s with 10000"),
        (NO_LOG, {"save": "3600 1 300 100 60 10000"}, "warning", "up to 3600 s"),
        (NO_LOG, {"save": ""}, "warning", "no append-only file, no snapshots: everything"),
        (NO_LOG, None, "warning", "whether there are snapshots cannot be read (CONFIG is not allowed)"),
        ({}, None, "warning", "cannot be read (INFO does not tell)"),
        ({**LOG, "aof_last_write_status": "err"}, EVERYSEC, "error", "last write of its append-only file failed"),
        ({**NO_LOG, "rdb_last_bgsave_status": "err"}, {"save": "300 1"}, "error", "last write of its snapshot failed"),
    ],
)
def test_the_loss_window_of_each_kind_of_store_is_named(info, config, level, says):
    found = diagnosis.loss_window(info, config)
    assert (found.level, says in found.says) == (level, True), found
    assert bool(found.fix) == (level != "ok"), "what is not well has its remedy"


def test_a_store_that_may_throw_keys_away_is_an_error():
    assert diagnosis.eviction({"maxmemory_policy": "noeviction"}).level == "ok"
    found = diagnosis.eviction({"maxmemory_policy": "allkeys-lru"})
    assert (found.level, found.fix) == ("error", "CONFIG SET maxmemory-policy noeviction")
    assert diagnosis.eviction({}).level == "warning"


@pytest.mark.parametrize(
    ("info", "level"),
    [
        ({"maxmemory": 0, "total_system_memory": 16 * GIB}, "ok"),
        ({"maxmemory": 0, "total_system_memory": 4 * GIB}, "warning"),
        ({"maxmemory": 6 * GIB, "used_memory": GIB}, "ok"),
        ({"maxmemory": 4 * GIB + 1}, "warning"),
        ({"maxmemory": 2 * GIB}, "error"),
        ({}, "ok"),
    ],
)
def test_memory_is_compared_with_what_the_recipe_lets_the_buffer_hold(info, level):
    found = diagnosis.memory(info, 4 * GIB)
    assert found.level == level, found
    assert "buffer.max_bytes is 4GiB" in found.says


def test_a_replica_and_an_old_server_are_errors():
    assert (
        diagnosis.server({"redis_version": "7.2.4", "valkey_version": "9.1.2", "role": "master"}).says == "Valkey 9.1.2"
    )
    assert diagnosis.server({"redis_version": "6.2.0", "role": "master"}).level == "ok"
    assert diagnosis.server({"redis_version": "6.0.16"}).level == "error"
    assert diagnosis.server({"redis_version": "7.0.1", "role": "slave"}).level == "error"


def test_a_failover_loses_what_the_replicas_do_not_have():
    assert diagnosis.failover({"connected_slaves": 0}) is None
    near = {"connected_slaves": 1, "slave0": {"ip": "10.0.0.2", "lag": 0}}
    assert diagnosis.failover(near).level == "ok"
    far = {"connected_slaves": 2, "slave0": {"lag": 0}, "slave1": {"lag": 7}}
    assert (diagnosis.failover(far).level, "7 s behind" in diagnosis.failover(far).says) == ("warning", True)


def test_a_store_far_away_or_in_another_time_is_a_warning():
    assert [diagnosis.round_trip(ms).level for ms in (0.1, 30.0)] == ["ok", "warning"]
    assert [diagnosis.clock(s).level for s in (0.2, -0.2, 90.0)] == ["ok", "ok", "warning"]
    assert "behind" in diagnosis.clock(-90.0).says
