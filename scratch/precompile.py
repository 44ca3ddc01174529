"""precompile.py PART PARTS: the kernels of the conformance cases into the cache."""
import sys, time, importlib, collections, os
sys.path[:0]=['tests','tests/backends','scratch']
import samekey
import torch
from tilewise import device
from tilewise.testing import make_inputs
from tilewise.testing.implementations import _problem
import test_conformance as tc
import triton
from tilewise.backends.gpu.compilation import types_of, compile_call
H=device.named('h200')
from tilewise.backends.hopper import BACKEND as HB
from tilewise.backends.triton import BACKEND as TB
part, parts = int(sys.argv[1]), int(sys.argv[2]); only=sys.argv[3:]
cases=[]
for name in dir(tc):
    f=getattr(tc,name)
    if name.startswith('test_') and getattr(f,'cases',None): cases+=[(name,c) for c in f.cases()]
keys={}; errs=collections.Counter()
import traceback
for name,c in cases:
    for b,B in (('hopper',HB),('triton',TB)):
        calls_of=importlib.import_module(f'tilewise.backends.{b}.launch').calls_of
        for cc in (c,c.forward_only()):
            try:
                p=_problem(cc, make_inputs(cc), b)
                if B.supports(p,H) is not None: continue
                for call in calls_of(p,H):
                    k=(call.kernel.__name__, types_of(call), tuple(call.options.items()))
                    keys.setdefault(k,(call,H))
                break
            except Exception as e:
                errs[type(e).__name__+str(e)[:80]]+=1
order=[k for k in sorted(keys,key=str) if not only or k[0] in only][part::parts]
print(triton.__version__, len(keys), len(order), errs.most_common(4), flush=True)
t=time.time(); bad=0
from tilewise.backends.gpu import compilation
for n,k in enumerate(order):
    try: compile_call(*keys[k],-1)
    except Exception as e:
        bad+=1; c=e
        while c: print(k[0], type(c).__name__, str(c)[-700:], flush=True); c=c.__cause__ or c.__context__
    compilation._compiled.cache_clear()
    if n%100==0: print(n, round(time.time()-t), bad, flush=True)
print('done', round(time.time()-t), bad)
