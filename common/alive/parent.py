"""The policy of the parent of a node: if a worker or a node is lost, all workers end,
and start again if restarts are left.

The parents of all nodes are connected to that of node 0 (wire/channel.py), which decides what has happened
(judge.py).
"""

import signal
import sys
import time
from typing import Optional

from common.alive.supervisor import AGAIN, Supervisor
from common.alive.wire import channel, hub
from common.alive.worker import Fault, Worker
from common.errors import STOP_SIGNALS, TrainingFailed, UserError


class Parent:
    """The policy of the parent of a node (loop.py): if a worker or a node is lost, all workers end."""

    def __init__(self, supervisor: Supervisor):
        self._supervisor = supervisor
        self._loop = supervisor.loop

    def run(self) -> int:
        """Start the workers; restart them after a fault if that may help and restarts are left.

        Return the job's exit code.
        """
        supervisor = self._supervisor
        supervisor.prepare(self)
        go = self._meet()
        while True:
            code = supervisor.train(go, self)
            if code != AGAIN:
                supervisor.disconnect()
                return code
            go = self._meet_again()

    def _meet(self) -> channel.Go:
        """Wait for the other nodes, and return the start message of node 0."""
        supervisor = self._supervisor
        world = supervisor.world
        if world.node_rank:
            self._loop.connection, go = channel.join(
                world.master_addr,
                world.master_port,
                supervisor.hello,
                supervisor.join_seconds,
                supervisor.say,
                supervisor.key,
            )
            return go
        if world.num_nodes > 1:
            supervisor.warn_if_unprotected()
            new_hub = hub.Hub(hub.listen(world.master_port), supervisor.hello, supervisor.say, supervisor.key)
            # set even if a node is missing: the doctor shows the findings of those that have joined
            self._loop.hub = new_hub
            try:
                new_hub.meet(supervisor.join_seconds)
            except UserError:
                new_hub.close()
                raise
        return supervisor.send_go()

    def _meet_again(self) -> channel.Go:
        """Wait until all nodes have ended their workers; return the next attempt's start message,
        or raise TrainingFailed."""
        supervisor = self._supervisor
        loop = self._loop
        supervisor.attempt += 1
        supervisor.say(f"restart {supervisor.attempt} of {supervisor.max_restarts} from the last checkpoint")
        loop.forget()
        ready: set[int] = set()
        deadline = time.monotonic() + supervisor.join_seconds
        while time.monotonic() < deadline:
            if loop.connection:
                loop.connection.tell(ready=supervisor.attempt)
            elif loop.hub:
                loop.hub.send(beat=True)
            if loop.stop_signal:
                sys.exit(STOP_SIGNALS[signal.Signals(loop.stop_signal)])
            for node, message in loop.messages():
                if message is None:
                    raise TrainingFailed(
                        f"node {node} is lost, so the job cannot be restarted in place; start it again"
                    )
                self.hear(node, message)
                if "go" in message:
                    return message["go"]
                if message.get("ready") == supervisor.attempt:
                    ready.add(node)
            if not loop.connection and len(ready) == loop.nodes - 1:
                return supervisor.send_go()
        raise TrainingFailed(
            f"the nodes did not meet again within {supervisor.join_seconds:.0f} s (--join_seconds)"
        )

    # --- The policy (loop.py) ---

    def on_signal(self, number: int, _frame: object) -> None:
        """Handle a stop signal: let the workers save and stop, or exit at once if there are none yet."""
        if not self._loop.workers:  # still waiting for the other nodes: there is nothing to save
            sys.exit(STOP_SIGNALS[signal.Signals(number)])
        self._stop(number)

    def _stop(self, number: int) -> None:
        if self._loop.stop_signal is None:
            self._loop.stop_signal = int(number)

    def hear(self, _node: int, message: channel.Message) -> None:
        if "stop" in message:
            self._stop(message["stop"])

    def handle_loss(self, node: int, _silent: bool, description: str) -> None:
        self._loop.blame(node, f"{self._supervisor.name_of(node)} {description}")

    def look_at(self, worker: Worker) -> None:
        """Report the fault of a worker. If a signal has stopped it, stop the job on SIGTERM."""
        if worker.was_stopped() and not worker.reported:  # by a signal that this process has not received
            self._stop(signal.SIGTERM)
        self._loop.report(worker)

    def workers_finished(self) -> bool:
        return self._supervisor.workers_finished()

    def other_nodes_finished(self) -> bool:
        return len(self._loop.finished) == self._loop.nodes - 1

    def tell(self, _beat: bool) -> None:
        """Do nothing: the others need know no more than the loop tells them."""

    def find_cause(self, stalls: bool) -> Optional[Fault]:
        return None if self._loop.stop_signal else self._loop.judge.verdict(stalls)

    def end_turn(self) -> Optional[int]:
        """Carry out the verdict, or go on with a stop. Return the exit code if the job is over, AGAIN if this
        attempt is and another follows, else None."""
        loop = self._loop
        if loop.verdict:
            return self._supervisor.carry_out(loop.verdict)
        if loop.stop_signal:
            return self._supervisor.continue_stop()
        nodes_finished = len(loop.finished) == loop.nodes
        all_finished = nodes_finished if loop.nodes > 1 else self.workers_finished()
        return 0 if all_finished else None
