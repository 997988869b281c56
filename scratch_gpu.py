import os, sys, argparse
sys.path.insert(0, "bench")
import torch, lockstep
import variants, models
from variants import Setup, Variant
from lockstep import wire
from lockstep.replica import layout, reducer
from lockstep.bench import interleave

SPECS = {
 "limit": None, "ddp": None, "ddp-bf16": None, "ddp-powersgd": None,
 "half/6": (wire.Half("bf16"), 6, 25), "half/1": (wire.Half("bf16"), 1, 25), "half/3": (wire.Half("bf16"), 3, 25), "half/1/50": (wire.Half("bf16"), 1, 50),
 "lowrank/6": (wire.LowRank(2), 6, 25), "lowrank/1": (wire.LowRank(2), 1, 25), "lowrank/1/100": (wire.LowRank(2), 1, 100), "lowrank/1/600": (wire.LowRank(2), 1, 600),
 **{f"half/1/{c}": (wire.Half("bf16"), 1, c) for c in (75,100,150,200,600)}, **{f"int8/{a}/{c}": (wire.Int8(), a, c) for a in (1,3,6) for c in (25,50,75,100,200,600)},
 **{f"lowrank/{a}/{c}": (wire.LowRank(2), a, c) for a in (1,2,3) for c in (100,150,200,250,300)}, **{f"sign/{a}/{c}": (wire.Sign(), a, c) for a in (1,2,6) for c in (25,100,140,200,600)}, **{f"topk/{a}/{c}": (wire.TopK(0.01), a, c) for a in (1,2,6) for c in (25,100,175,200)},
 "topk/1/600": (wire.TopK(0.01), 1, 600),
}
def make(name, setup, world):
    spec = SPECS[name]
    if spec is None:
        return Variant(name, setup, world)
    w, share, cap = spec
    layout.SHARE_OF_REST = share
    old = variants._wrap
    variants._wrap = lambda n, module, world, optimizer=None: lockstep.DataParallel(module, wire=w, bucket_cap_mb=cap)
    try:
        v = Variant("lockstep", setup, world)
    finally:
        variants._wrap = old
    v._share = share
    return v
def train(options):
    os.environ.update(NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_HOSTID=os.environ["RANK"])
    world = lockstep.join(device="cuda")
    setup = Setup("gpt2-124m", 4, 1024, True)
    names = options.variants
    trained = {n: make(n, setup, world) for n in names}
    fed = variants.batches(setup, world)
    def stepper(v):
        def go(k):
            layout.SHARE_OF_REST = getattr(v, "_share", 6)
            v.step(fed[k % len(fed)])
        return go
    actions = {n: stepper(v) for n, v in trained.items()}
    m = interleave.measure(world, actions, rounds=options.steps, warmup=5)
    out = []
    for n, t in m.times.items():
        lo, med, hi = (1e3*q for q in interleave.spread(t))
        r = interleave.compare(m.times, interleave.ratio, n, "ddp") if n != "ddp" and "ddp" in m.times else None
        nb = len(getattr(getattr(trained[n].model, "_reducer", None), "_buckets").all) if hasattr(trained[n].model, "_reducer") and trained[n].model._reducer else 0
        out.append(f"{n:16} {med:8.1f} ({lo:.1f}-{hi:.1f})  {r.median if r else 1:.3f} buckets {nb}")
    if options.profile and world.rank == 0:
        pass
    for n in options.profile or []:
        from torch.profiler import profile, ProfilerActivity
        world.barrier()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
            for k in range(3):
                actions[n](k)
            torch.cuda.synchronize()
        out.append(f"== {n} cuda\n" + prof.key_averages().table(sort_by="self_cuda_time_total", row_limit=18, max_name_column_width=60))
        out.append(f"== {n} cpu\n" + prof.key_averages().table(sort_by="self_cpu_time_total", row_limit=14, max_name_column_width=60))
    return "\n".join(out)
if __name__ == "__main__":
    p = argparse.ArgumentParser(); p.add_argument("--variants", nargs="+", default=list(SPECS)); p.add_argument("--steps", type=int, default=14); p.add_argument("--profile", nargs="*")
    o = p.parse_args()
    print(lockstep.launch(train, workers=2, args=(o,))[0])
