"""One user's prefix KV from process to process: as one contiguous region, beside fixed blocks of tokens of a layer.

Loopback, without TLS. A round trip is stated: each confirmation leaves so much later. Blocks have a header each, and go
to where the receiver has them; *by layer*: a layer's blocks are confirmed before the next ones go, as a paged cache is
sent layer by layer; *at once*: only the last one is confirmed.
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import time
from typing import Final, NamedTuple

import numpy as np

from relaygr_stream.workload.quantiles import nearest_rank

MIB: Final = 1 << 20
LAYERS: Final = 8
TOKENS: Final = 1024
TOKEN_BYTES: Final = 2048  # of a layer: K and V of width 256 in float32
ROUND_TRIP_S: Final = 2e-4
BLOCKS: Final = (16, 32, 64)
#: Of the times of one way: other programs only add to them.
QUANTILE: Final = 0.1
#: Layer, first token, bytes; whether a confirmation is wanted.
HEADER: Final = struct.Struct("<IIQB")


class Way(NamedTuple):
    """How one is sent. block: tokens; 0: the whole in one piece."""

    block: int
    by_layer: bool = True

    def pieces(self) -> list[tuple[int, int, int, bool]]:
        """Layer, first token, bytes, confirmed."""
        if not self.block:
            return [(0, 0, LAYERS * TOKENS * TOKEN_BYTES, True)]
        last = TOKENS - self.block
        return [
            (layer, token, self.block * TOKEN_BYTES, token == last and (self.by_layer or layer == LAYERS - 1))
            for layer in range(LAYERS)
            for token in range(0, TOKENS, self.block)
        ]

    def __str__(self) -> str:
        if not self.block:
            return "contiguous"
        return f"blocks of {self.block} tokens, {'by layer' if self.by_layer else 'at once'}"


WAYS: Final = (Way(0), *(Way(block, by_layer) for by_layer in (True, False) for block in BLOCKS))


def _receive(port: int) -> None:
    """Until the other end hangs up."""
    memory = memoryview(bytearray(LAYERS * TOKENS * TOKEN_BYTES))
    header = memoryview(bytearray(HEADER.size))
    with socket.create_connection(("127.0.0.1", port)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while _fill(link, header):
            layer, token, nbytes, confirmed = HEADER.unpack(header)
            at = (layer * TOKENS + token) * TOKEN_BYTES
            _fill(link, memory[at : at + nbytes])
            if confirmed:
                until = time.perf_counter() + ROUND_TRIP_S
                while time.perf_counter() < until:
                    pass
                link.sendall(b"!")


def _fill(link: socket.socket, into: memoryview) -> bool:
    while into:
        got = link.recv_into(into)
        if not got:
            return False
        into = into[got:]
    return True


def _send(link: socket.socket, memory: memoryview, way: Way) -> float:
    """Seconds until the last confirmation."""
    start, answer = time.perf_counter(), memoryview(bytearray(1))
    for layer, token, nbytes, confirmed in way.pieces():
        at = (layer * TOKENS + token) * TOKEN_BYTES
        link.sendall(HEADER.pack(layer, token, nbytes, confirmed), socket.MSG_MORE)
        link.sendall(memory[at : at + nbytes])
        if confirmed:
            _fill(link, answer)
    return time.perf_counter() - start


def blocks(*, quick: bool) -> list[str]:
    """Prints the table and returns the bounds not kept."""
    memory = np.random.default_rng(0).integers(0, 255, LAYERS * TOKENS * TOKEN_BYTES, np.uint8).data
    seconds: dict[Way, list[float]] = {way: [] for way in WAYS}
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = multiprocessing.get_context("spawn").Process(
            target=_receive, args=server.getsockname()[1:], daemon=True
        )
        child.start()
        link, _ = server.accept()
        with link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(20 if quick else 100):
                for way in WAYS:
                    seconds[way].append(_send(link, memory, way))
        child.join(20)
    ms = {way: 1e3 * nearest_rank(each, QUANTILE) for way, each in seconds.items()}
    whole = ms[WAYS[0]]
    print(f"\n{LAYERS} layers, {TOKENS} tokens, {len(memory) / MIB:g} MiB; round trip {ROUND_TRIP_S * 1e3:g} ms")
    print(f"{'sent as':<32} {'ms':>8} {'contiguous takes':>18}")
    for way, each in ms.items():
        print(f"{way!s:<32} {each:>8.1f} {whole / each:>17.2f}×")
    slower = [way for way in WAYS if way.by_layer and way.block and ms[way] < whole]
    return [f"{way}: quicker than one contiguous region; bound: no way is" for way in slower]
