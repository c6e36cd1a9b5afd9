"""``python -m stopway_gateway``: settings from the environment, prefix ``STOPWAY_``."""

from __future__ import annotations

import logging
import sys

from pydantic import ValidationError

from stopway_gateway.app import create_app
from stopway_gateway.config import Settings
from stopway_gateway.server import GatewayServer


def main() -> None:
    """Serve until a signal, then drain."""
    try:
        settings = Settings()
        app = create_app(settings)
    except (ValidationError, ValueError) as error:
        sys.exit(f"the settings can't be used: {error}")
    logging.basicConfig(
        level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for chatty in ("httpx", "httpcore", "websockets"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    server = GatewayServer(app)
    server.run()
    if not server.started:
        sys.exit(3)


if __name__ == "__main__":
    main()
