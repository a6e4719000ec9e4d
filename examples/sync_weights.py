"""A trainer keeps the weights of an inference process up to date, over a local socket or through files in a folder.

    python examples/sync_weights.py              # over a socket on 127.0.0.1
    python examples/sync_weights.py --folder out/weights
    python examples/sync_weights.py --lose 3     # the third message is lost: the engine refuses the next one and gets a full one

After every step of AdamW the trainer sends what changed. The engine's model has the receiver's memory, so a step costs no copy of the
model. At the end both print the SHA-256 of their weights, which must be equal: the exit status is 1 if they differ.
"""

from __future__ import annotations

import argparse
import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ds_zipccl import sync
from ds_zipccl.sync import Receiver, Sender, SyncError, SyncErrorCode

#: Refusals that a full message heals. After any other error the stream cannot be read on.
HEALED = (SyncErrorCode.BASE, SyncErrorCode.HASH, SyncErrorCode.FRAME)
WAIT_S = 120  # for the other process


def model() -> torch.nn.Module:
    """A language model with tied embeddings, in bfloat16."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Embedding(2000, 256), torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256),
        torch.nn.LayerNorm(256), torch.nn.Linear(256, 2000, bias=False),
    )  # fmt: skip
    net[5].weight = net[0].weight
    return net.bfloat16()


def digest(net: torch.nn.Module) -> str:
    """SHA-256 of all weights."""
    found = hashlib.sha256()
    for name, tensor in sorted(net.state_dict().items()):
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class OverSocket:
    """Messages one way and a byte for each of them back: K for applied, F for "send all"."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(WAIT_S)
        self._stream = connection.makefile("rwb")

    def send(self, frames: Iterator[torch.Tensor]) -> tuple[int, bool]:
        """Send a message; bytes of it, and whether the engine applied it."""
        size = sync.save(frames, self._stream)
        return size, self._stream.read(1) == b"K"

    def receive(self) -> Iterator[torch.Tensor]:
        return sync.load(self._stream)

    def answer(self, applied: bool) -> None:
        self._stream.write(b"K" if applied else b"F")
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


class OverFolder:
    """A file for each message, and one with the answer. An engine that starts again would apply all files from the last full one on."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0

    def _next(self, suffix: str) -> Path:
        return self._folder / f"{self._count:06d}.{suffix}"

    def _wait(self, path: Path) -> None:
        end = time.monotonic() + WAIT_S
        while not path.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"no {path} after {WAIT_S} s")
            time.sleep(0.01)

    def send(self, frames: Iterator[torch.Tensor]) -> tuple[int, bool]:
        """Write a message; bytes of it, and whether the engine applied it."""
        size = sync.save(frames, self._next("zsync"))
        self._wait(self._next("answer"))
        applied = self._next("answer").read_bytes() == b"K"
        self._count += 1
        return size, applied

    def receive(self) -> Iterator[torch.Tensor]:
        self._wait(self._next("zsync"))
        if not self._next("zsync").stat().st_size:
            raise EOFError
        return sync.load(self._next("zsync"))

    def answer(self, applied: bool) -> None:
        partial = self._next("answer.part")
        partial.write_bytes(b"K" if applied else b"F")
        partial.rename(self._next("answer"))
        self._count += 1

    def close(self) -> None:
        self._next("zsync").touch()


Way = OverSocket | OverFolder


def train(way: Way, steps: int, lose: int) -> str:
    """Train, and send the weights after every step; the digest of the last ones."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-5)
    sender = Sender()
    tokens = torch.randint(0, 2000, (64, 33), generator=torch.Generator().manual_seed(1))
    whole = sum(tensor.nbytes for tensor in net.parameters())
    for step in range(steps + 1):
        if step:  # the first message has the weights before any training
            logits = net(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step == lose:
            for _ in sender.pack(net.state_dict()):
                pass
            print(f"trainer: step {step}, message {sender.version} lost", flush=True)
            continue
        size, applied = way.send(sender.pack(net.state_dict()))
        print(f"trainer: step {step}, version {sender.version}, {size} bytes, ratio {whole / size:.1f}", flush=True)
        if not applied:
            size, applied = way.send(sender.pack(net.state_dict(), full=True))
            print(f"trainer: step {step}, version {sender.version}, {size} bytes, full", flush=True)
        assert applied, "the engine refused a full message"
    way.close()
    return digest(net)


def serve(way: Way) -> str:
    """Apply messages until there are no more; the digest of the last weights."""
    net, receiver = model(), Receiver()
    for parameter in net.parameters():
        torch.nn.init.zeros_(parameter)  # nothing of the trainer's but what is sent
    assigned = False
    while True:
        try:
            state = receiver.apply(way.receive())
        except EOFError:
            return digest(net)
        except SyncError as error:
            if error.code not in HEALED:
                raise
            print(f"engine: {error}", flush=True)
            way.answer(False)
            continue
        if not assigned:
            net.load_state_dict(state, assign=True)  # later messages change this memory
            assigned = True
        way.answer(True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="send files in this new folder (a socket)")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps (6)")
    parser.add_argument("--lose", type=int, default=-1, metavar="STEP", help="lose the message of this step (none)")
    parser.add_argument("--engine", type=int, metavar="PORT", help=argparse.SUPPRESS)  # 0: over --folder
    args = parser.parse_args()
    if args.engine is not None:
        way = (
            OverSocket(socket.create_connection(("127.0.0.1", args.engine))) if args.engine else OverFolder(args.folder)
        )
        print(f"engine: weights {serve(way)}", flush=True)
        return 0
    command = [sys.executable, __file__]
    if args.folder is not None:
        args.folder.mkdir(parents=True)
        engine = subprocess.Popen(
            [*command, "--engine", "0", "--folder", args.folder], stdout=subprocess.PIPE, text=True
        )
        way = OverFolder(args.folder)
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(WAIT_S)
            port = str(server.getsockname()[1])
            engine = subprocess.Popen([*command, "--engine", port], stdout=subprocess.PIPE, text=True)
            way = OverSocket(server.accept()[0])
    try:
        mine = train(way, args.steps, args.lose)
        said, _ = engine.communicate(timeout=WAIT_S)
    finally:
        engine.kill()
    print(said, end="")
    print(f"trainer: weights {mine}")
    return 0 if said.endswith(f"engine: weights {mine}\n") else 1


if __name__ == "__main__":
    sys.exit(main())
