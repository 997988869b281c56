"""Watches a script that does not ask for it: for `lockstep run --watch`, and LOCKSTEP_WATCH under any launcher."""

from lockstep.replica.data_parallel import DataParallel
from lockstep.watching.watcher import watch
from lockstep.world import World


def enter(world: World, folder: str) -> None:
    """Watch every model that is wrapped in `world` from now on; called by `join` where the environment says so."""

    def see(model: DataParallel) -> None:
        watch(model, folder)

    world.on_wrap.append(see)
