"""`metaleo serve`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from metaleo.cli.common import Switch, default_is, tell
from metaleo.errors import needs_extra, require_between


@dataclasses.dataclass(frozen=True)
class Serve:
    """A page to try models on, and a JSON API: http://127.0.0.1:8765/ unless told otherwise.

    On the page: place points and see what functions a model imagines, draw symbols of your own and have them named,
    drop a table and have its rows named. The models of this package are always served; MODEL adds run folders and model
    files under their names, with a number where a name is taken. The API is described at /api/docs. Requests are
    limited in size, time, rate and memory, and kept tasks in number, so that memory stays bounded. With a --host that
    lets other machines in, they need the token that is printed at the start ($METALEO_TOKEN, or else a new one).

    Try:
      metaleo serve --open
      metaleo serve runs/leo-5way-1shot --port 9000
      curl -s http://127.0.0.1:8765/api/models
    """

    models: Annotated[
        tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL [MODEL ...]]", help_behavior_hint="")
    ] = ()
    """More models: run folders or model files."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in, who then need a token."""
    allow_host: Annotated[tuple[str, ...], default_is("none", metavar="NAME [NAME ...]")] = ()
    """More names that the server answers to, such as that of a proxy in front of it."""
    port: int = 8765
    """Port to listen on; 0: any that is free."""
    open: Switch = False
    """Open the page in a browser."""
    rate: float = 200.0
    """Requests per second from one address, in the long run; twice as many may come at once."""
    tasks: int = 512
    """Adapted tasks that are kept; the least recently used is forgotten first."""
    megabytes: float = 8.0
    """Of one request."""

    def run(self) -> None:
        require_between(0, 65535, port=self.port)
        require_between(1, 1_000_000, rate=self.rate, tasks=self.tasks)
        require_between(0.01, 48, megabytes=self.megabytes)
        with needs_extra("serve"):
            from metaleo.serve.server import Limits, serve

        limits = Limits(
            body_bytes=int(self.megabytes * 2**20), rate=self.rate, burst=int(2 * self.rate), tasks=self.tasks
        )
        serve(self.models, self.host, self.port, limits, self.open, tell, self.allow_host)
