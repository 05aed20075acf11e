"""The simulated Redis against a real one: the same commands, the same replies."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from hiredis import pack_command

from outrider.shared.log import commit_scripts
from tests.redis_server import RedisServer
from tests.simulation.faults import Faults
from tests.simulation.links import Network
from tests.simulation.loop import Process, SimLoop
from tests.simulation.redis_process.log_rules import LogRules
from tests.simulation.redis_process.node import Journal, RedisNode

NUM_COMMANDS = 600


def drawn_commands(rng: random.Random, shas: list[str]) -> list[tuple[Any, ...]]:
    """Calls of the scripts on few requests, by few holders, in any order: most of them do not fit."""
    begin, append, restore, claim = shas
    commands: list[tuple[Any, ...]] = []
    for _ in range(NUM_COMMANDS):
        stem, holder, term = f"r{rng.randrange(3)}", rng.choice("ab"), rng.randrange(3)
        keys = (f"{stem}:0:log", f"{stem}:0:fence", f"{stem}:record")
        record = rng.choice((b"record", b"record", b"another"))
        entry = (rng.randrange(4), 1, bytes([rng.randrange(3), 0, 0, 0]), 0, term, b"\xff\x00")
        commands.append(
            rng.choice(
                [
                    ("EVALSHA", begin, 1, keys[2], record, 600),
                    ("EVALSHA", append, 3, *keys, term, holder, 600, *entry, record),
                    ("EVALSHA", append, 3, *keys, term, holder, 600, *entry, record),
                    ("EVALSHA", restore, 3, *keys, term, holder, 600, record, *(0, *entry[1:])),
                    ("EVALSHA", claim, 2, keys[2], keys[1], holder, 600, record),
                    ("XRANGE", keys[0], "-", "+"),
                    ("GET", keys[2]),
                    ("DEL", rng.choice(keys)),
                ]
            )
        )
    return commands


def make_node(tell: Callable[[str], None] = lambda rule: None) -> RedisNode:
    """tell: gets the rules that are broken."""
    loop = SimLoop(random.Random(1))
    process = Process(loop, "redis")
    rules = LogRules(random.Random(4), tell, lambda record, choice: False)
    net = Network(loop, random.Random(2), Faults(random.Random(3), ()))
    return process.main.context.run(RedisNode, net, process, Journal(), lambda name, end: None, rules)


def test_the_scripts_do_the_same_in_a_real_redis(tmp_path: Path) -> None:
    node = make_node()
    with RedisServer(tmp_path) as server, redis.Redis(port=server.port) as client:
        shas = [str(client.script_load(script)) for script in commit_scripts.ALL]
        for script in commit_scripts.ALL:
            node.execute(("SCRIPT", "LOAD", script))
        connection = client.connection_pool.get_connection()
        num_done = 0
        for command in drawn_commands(random.Random(5), shas):
            connection.send_packed_command([pack_command(command)])
            reply = connection.read_response()
            assert node.execute(command) == reply, command
            num_done += reply not in (0, -1, [], None)
        client.connection_pool.release(connection)
    assert num_done > NUM_COMMANDS / 4


def test_a_restart_does_the_journal_again_and_forgets_scripts() -> None:
    node = make_node()
    sha = node.execute(("SCRIPT", "LOAD", commit_scripts.BEGIN))
    node.execute(("EVALSHA", sha, 1, "r:record", b"record", 600))
    node.execute(("SET", "other", b"x", "EX", 60))
    journal = Journal(node.journal.commands[:1])
    again = node.process.main.context.run(
        RedisNode, node._net, node.process, journal, lambda name, end: None, node._rules
    )
    assert again.execute(("GET", "r:record")) == b"record"
    assert again.execute(("GET", "other")) is None
    assert "NoScript" in type(again.execute(("EVALSHA", sha, 1, "r:record", b"record", 600))).__name__
