"""moto's S3 server on loopback, the files of a folder in its bucket `caches`: `python s3_server.py PORT FOLDER`.

The files are put in before the port is open, so a client sees no server or all of them. What clients put or delete is
a file in the folder, or gone from it, before they are told: a server killed and started again has all that it took.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple
from werkzeug.test import Client

port, folder = int(sys.argv[1]), Path(sys.argv[2])
application = DomainDispatcherApplication(create_backend_app)
client = Client(application)
assert client.put("/caches").status_code == 200
for path in folder.rglob("*"):
    if path.is_file() and not path.name.startswith(".aside"):
        assert client.put(f"/caches/{path.relative_to(folder)}", data=path.read_bytes()).status_code == 200


def keep(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer a request, after the object that it changed is on the disk."""
    path_info, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
    answer = list(application(environ, start_response))
    key = re.fullmatch(r"/caches/(.+[^/])", path_info)
    if key is not None and method in ("PUT", "POST", "DELETE"):
        path = folder / key[1]
        now = client.get(path_info, headers={"Authorization": environ["HTTP_AUTHORIZATION"]})  # it is private
        if now.status_code == 200:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f".aside-{path.name}")
            aside.write_bytes(now.data)
            aside.replace(path)
        else:
            path.unlink(missing_ok=True)
    return answer


run_simple("127.0.0.1", port, keep, threaded=True)
