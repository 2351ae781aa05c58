"""Keeps one child process no longer than its parent: ``python -m ledgerlake.devbroker.supervise
COMMAND...``.

Standard input is a pipe from the parent. When it closes, whatever ended the parent, the child is
asked to stop and then made to. A pipe works on every Unix and needs no signal from the kernel.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

STOP_GRACE_S = 20


def main(command: list[str]) -> int:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def stop(*_: object) -> None:
        child.terminate()
        timer = threading.Timer(STOP_GRACE_S, child.kill)
        timer.daemon = True
        timer.start()

    def watch_parent() -> None:
        while sys.stdin.buffer.read(1):
            pass
        stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=watch_parent, daemon=True).start()
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
