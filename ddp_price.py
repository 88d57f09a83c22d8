"""torchrun: a step of DistributedDataParallel with the plug-in off and on."""
import os, statistics, torch, torch.distributed as dist, torch.nn.functional as F
import minicompile as mc
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from minicompile.bench.models import Block
from minicompile.ops.plugins import available
dist.init_process_group("nccl"); r=dist.get_rank(); torch.cuda.set_device(r)
base=[p.name for p in available().values() if p.default]
class Net(nn.Module):
    def __init__(s,w,n):
        super().__init__(); s.blocks=nn.ModuleList(Block(w,w//64) for _ in range(n))
    def forward(s,x):
        for b in s.blocks: x=b(x)
        return x
for w,n,shape in ((768,12,(8,512)),(1600,12,(4,512)),(768,12,(1,128))):
    steps={}
    x=torch.randn(*shape,w,device="cuda",dtype=torch.bfloat16)
    for k in ("eager","off","on"):
        torch.manual_seed(0)
        m=Net(w,n).cuda().bfloat16()
        f=m if k=="eager" else mc.compile(m,dynamic=False,options={"plugins":[b for b in base if b!="gradient_buckets" or k=="on"]})
        steps[k]=(DDP(f,device_ids=[r]),m)
    def step(k):
        d,m=steps[k]
        y=d(x); y.float().pow(2).mean().backward(); m.zero_grad(set_to_none=True)
    for k in steps:
        for _ in range(5): step(k)
    t={k:[] for k in steps}
    for turn in range(30):
        for k in steps:
            torch.cuda.synchronize(); dist.barrier(); torch.cuda.synchronize()
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            import time; s=time.perf_counter()
            step(k); step(k); torch.cuda.synchronize(); t[k].append((time.perf_counter()-s)/2*1e3)
    if r==0: print(w,n,shape,{k:round(statistics.median(v),3) for k,v in t.items()},flush=True)
dist.destroy_process_group()
