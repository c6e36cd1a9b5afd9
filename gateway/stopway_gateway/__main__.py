"""``python -m stopway_gateway``: settings from the environment, prefix ``STOPWAY_``.

It exits with 0 after a drain, and with ``EXIT_CONFIG`` when a setting must be changed first.
"""

from __future__ import annotations

import logging
import sys

from stopway_gateway.app import create_app
from stopway_gateway.config import EXIT_CONFIG, ConfigError, load_settings
from stopway_gateway.server import GatewayServer, listen


def main() -> None:
    """Serve until a signal, then drain."""
    try:
        settings = load_settings()
        listener = listen(settings)
    except ConfigError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(EXIT_CONFIG)
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("httpx", "httpcore", "websockets"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    server = GatewayServer(create_app(settings))
    server.run(sockets=[listener])
    if not server.started:
        sys.exit(3)


if __name__ == "__main__":
    main()
