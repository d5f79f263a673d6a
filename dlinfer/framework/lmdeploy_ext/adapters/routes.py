"""HTTP routes of LMDeploy's api_server that load and unload LoRA adapters. Paths and fields are those of vLLM."""

import asyncio
from http import HTTPStatus
from typing import Any

from dlinfer.errors import AdapterChangeError, DlinferError
from dlinfer.framework.lmdeploy_ext.adapters import manager
from dlinfer.framework.lmdeploy_ext.device import activation
from dlinfer.framework.patching import Original, replaces


async def change(async_engine: Any, name: str, folder: str | None) -> None:
    """Load the adapter in a folder under a name, or unload it if ``folder`` is None.

    async_engine: LMDeploy's AsyncEngine, whose engine may run in another process. Raises the errors of
    ``manager.change``. An adapter that is being loaded stays loaded if the caller is cancelled.
    """
    await asyncio.shield(asyncio.ensure_future(_change(async_engine, name, folder)))


async def _change(async_engine: Any, name: str, folder: str | None) -> None:
    if folder is not None and name == async_engine.model_name:
        raise AdapterChangeError(
            change="load", name=name, detail="the model itself has this name", advice="use another name"
        )
    engine, adapters = async_engine.engine, async_engine.backend_config.adapters
    if not hasattr(engine, "_collective_rpc_async"):  # the engine runs in this process, and has the same dict
        await manager.change(engine, name, folder)
        return
    if folder is None:
        adapters.pop(name, None)
    if error := await engine._collective_rpc_async(change_adapters.__name__, name, folder):
        raise error
    if folder is not None:
        adapters[name] = folder


async def change_adapters(self: Any, name: str, folder: str | None) -> DlinferError | None:
    """Do ``manager.change`` in the engine's process. Return its error, because a raised one arrives as bare text."""
    try:
        await manager.change(self.engine, name, folder)
    except DlinferError as error:
        return error
    return None


@replaces(
    "lmdeploy.pytorch.engine.mp_engine.base_worker:EngineWorkerBase.__init__",
    why="has no call that changes adapters. LMDeploy offers the public methods of this class to the server's process",
    when=activation.is_on,
)
def worker(original: Original, self: Any, engine: Any) -> None:
    original(self, engine)
    setattr(type(self), change_adapters.__name__, change_adapters)


@replaces(
    "lmdeploy.serve.openai.endpoints.router:create_openai_router",
    why="has no routes that load and unload adapters",
    when=activation.is_on,
)
def create_openai_router(original: Original, server_context: Any) -> Any:
    from fastapi import Depends
    from fastapi.responses import JSONResponse
    from lmdeploy.serve.openai.errors import create_error_response
    from lmdeploy.serve.utils.server_utils import validate_json_request
    from pydantic import BaseModel

    router = original(server_context)

    class LoadAdapter(BaseModel):
        lora_name: str
        lora_path: str

    class UnloadAdapter(BaseModel):
        lora_name: str

    async def answer(name: str, folder: str | None) -> JSONResponse:
        is_known = name in (server_context.engine_config.adapters or {})
        try:
            await change(server_context.async_engine, name, folder)
        except DlinferError as error:
            is_missing = folder is None and not is_known
            return create_error_response(
                HTTPStatus.NOT_FOUND if is_missing else HTTPStatus.BAD_REQUEST, str(error)
            )
        done = "removed" if folder is None else "added"
        return JSONResponse(f"Success: LoRA adapter {name!r} {done} successfully.")

    @router.post("/v1/load_lora_adapter", dependencies=[Depends(validate_json_request)])
    async def load_lora_adapter(request: LoadAdapter) -> JSONResponse:
        return await answer(request.lora_name, request.lora_path)

    @router.post("/v1/unload_lora_adapter", dependencies=[Depends(validate_json_request)])
    async def unload_lora_adapter(request: UnloadAdapter) -> JSONResponse:
        return await answer(request.lora_name, None)

    return router
