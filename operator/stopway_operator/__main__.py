"""``python -m stopway_operator --all | --namespace NS ...``; see config.py for the environment."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from typing import Any, cast

import kopf

from stopway_operator import kinds
from stopway_operator.api import Api, ApiError, connect
from stopway_operator.config import OperatorConfig, load_config
from stopway_operator.handlers import registry_of, settings
from stopway_operator.health import Health
from stopway_operator.reconciler import Reconciler

_LOG = logging.getLogger("stopway_operator")
_RETRY_S = 3.0


def main() -> None:
    """Run until a signal."""
    parser = argparse.ArgumentParser(prog="stopway-operator", description=__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--all", action="store_true", help="serve all namespaces")
    where.add_argument("--namespace", action="append", help="serve this one (may be repeated)")
    parser.add_argument("--verbose", action="store_true", help="more words")
    options = parser.parse_args()
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for chatty in ("kopf", "aiohttp"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        # One line for each watch and attempt of an outage, which the relists tell of as well.
        handler.addFilter(lambda record: not record.getMessage().startswith("Request attempt"))
    try:
        config = load_config(os.environ)
    except ValueError as error:
        sys.exit(f"the settings can't be used: {error}")
    asyncio.run(run(config, None if options.all else options.namespace))


async def run(config: OperatorConfig, namespaces: list[str] | None) -> None:
    """Watch and reconcile until a signal or a failure that only a restart helps."""
    api = Api(await connect())
    reconciler = Reconciler(api, config, namespaces)
    health = Health(reconciler, api, config.resync_s)
    await health.start(config.health_port)
    try:
        await _first_list(reconciler)
        await _serve(reconciler, namespaces)
    finally:
        await health.close()
        await reconciler.close()
        await api.close()


async def _first_list(reconciler: Reconciler) -> None:
    """The CRD may come after the operator, and permissions too."""
    while True:
        try:
            await reconciler.relist()
            return
        except ApiError as error:
            what = f"are the CRD and the RBAC there? {error}"
            _LOG.warning("cannot list %s yet (%s)", kinds.SERVICE.plural, what)
            await asyncio.sleep(_RETRY_S)


async def _serve(reconciler: Reconciler, namespaces: list[str] | None) -> None:
    watching = asyncio.create_task(
        kopf.operator(
            registry=registry_of(reconciler.store),
            settings=settings(),
            # Else kopf asks for the user's name, and a pod's user has none.
            identity=cast(Any, os.environ.get("HOSTNAME") or "stopway-operator"),
            clusterwide=namespaces is None,
            namespaces=namespaces or (),
            standalone=True,
        ),
        name="watch",
    )
    working = asyncio.create_task(reconciler.run(), name="work")
    try:
        done, _ = await asyncio.wait({watching, working}, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (working, watching):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(working, watching, return_exceptions=True)


if __name__ == "__main__":
    main()
