"""One writer a cache in a store, as far as stores let it: an object that says who writes, renewed while it lives.

Stores have no locks, and pyarrow.fs no conditional put. What this can do: a writer that comes while another one's
marker is being renewed is refused; a marker that nobody renews for `WATCH_SECONDS` is taken over, at once if it was
left by a run of the same staging folder, whose kernel lock proves that run dead. Whoever finds another's marker before
it announces a shard stops. What it cannot do: shut out two writers that begin within one request of each other, or one
that sleeps for longer than the watch and wakes between its check and its put. Such a pair may overwrite one another's
shards, never unseen: the rows' checksums then fail, and `dflash verify --full` names the samples.
"""

import json
import os
import secrets
import time
from threading import Event, Thread

from dflash_cache.cache.remote import MARKER
from dflash_cache.cache.store import RemoteStore
from dflash_cache.errors import CacheError, WriteError

BEAT_SECONDS = 10.0
WATCH_SECONDS = 45.0
_POLL_SECONDS = 1.0
_LOOKS = 5
_LOOK_SECONDS = 0.3


class WriterMarker:
    """Says that this process writes the store's cache; `staging` names the folder that it works in.

    A new marker is claimed by `claim`, renewed on a thread of its own until `release`. With the `token` of another
    process's marker it only checks that this one still stands.
    """

    def __init__(self, store: RemoteStore, staging: str, token: str | None = None) -> None:
        self._store, self._staging = store, staging
        self.token = token or secrets.token_hex(8)
        self._num_beats = 0
        self._ended = Event()
        self._is_abandoned = False
        self._thread = Thread(target=self._renew, name="marker", daemon=True)

    def claim(self) -> str | None:
        """Put the marker; returns a sentence if it was another's. Raises CacheError if that one is alive."""
        found = self._store.read(MARKER)
        sentence = None
        if found is not None and (was := _parse(found)).get("staging") != self._staging:
            self._watch(found)
            sentence = (
                f"Took over {self._store.place} from {was.get('owner', 'an unknown writer')}, which was not heard of "
                f"for {WATCH_SECONDS:g} s."
            )
        self._beat()
        self._thread.start()
        return sentence

    def check(self) -> None:
        """Raise WriteError if someone else has taken the cache over."""
        for _ in range(_LOOKS):
            was = _parse(self._store.read(MARKER) or b"")
            if was:
                break
            time.sleep(_LOOK_SECONDS)  # where a put is not atomic (HDFS, a mounted disk), it may be under way
        if was.get("token") != self.token:
            raise WriteError(
                f"The cache at {self._store.place} is not this run's any more, {was.get('owner', 'someone')} has taken "
                "it over: let that one go on."
            )

    def abandon(self) -> None:
        """Leave the marker where it is: the store has failed, and asking it once more would only take time."""
        self._ended.set()
        self._is_abandoned = True

    def release(self) -> None:
        """Take the marker away if it is still this run's."""
        self._ended.set()
        if self._is_abandoned:
            return
        self._store.stop_retrying()
        if self._thread.is_alive():
            self._thread.join()
        try:
            self.check()
            self._store.delete(MARKER)
        except CacheError:
            return

    def _watch(self, found: bytes) -> None:
        deadline = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            now = self._store.read(MARKER)
            if now is None:
                return
            if now != found:
                raise CacheError(
                    f"Another `dflash generate` is writing the cache at {self._store.place} "
                    f"({_parse(now).get('owner', 'an unknown writer')}): wait until it has ended, or stop it."
                )

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            try:
                self.check()
                self._beat()
            except CacheError:  # gone, or another's: the next announcement says so
                return

    def _beat(self) -> None:
        self._num_beats += 1
        owner = f"process {os.getpid()} on {os.uname().nodename}"
        marker = {"owner": owner, "token": self.token, "staging": self._staging, "beat": self._num_beats}
        self._store.put(MARKER, json.dumps(marker | {"time": time.strftime("%FT%TZ", time.gmtime())}).encode())


def _parse(data: bytes) -> dict[str, object]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
