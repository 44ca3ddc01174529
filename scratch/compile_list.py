"""compile_list.py PART PARTS: recorded kernels into the cache."""
import sys, glob, pickle, importlib, time
sys.path[:0]=['scratch']
import samekey, triton
from triton.backends.compiler import GPUTarget
from tilewise.backends.gpu import compilation
part, parts = int(sys.argv[1]), int(sys.argv[2])
keys={}
for f in sorted(glob.glob('/tmp/kernels/*')):
    b=open(f,'rb').read(); at=0
    while at<len(b):
        n=int.from_bytes(b[at:at+4],'little'); test,key=pickle.loads(b[at+4:at+4+n]); at+=4+n
        keys.setdefault(key,test)
order=sorted(keys,key=str)[part::parts]
print(triton.__version__, len(keys), len(order), flush=True)
t=time.time(); bad=0
target=GPUTarget('cuda',90,32)
for i,(module,name,types,options) in enumerate(order):
    try: compilation._compiled(getattr(importlib.import_module(module),name),types,options,target,-1)
    except Exception as e:
        bad+=1; c=e
        while c: print(name, keys[order[i]], type(c).__name__, str(c)[-500:], flush=True); c=c.__cause__ or c.__context__
    compilation._compiled.cache_clear()
    if i%100==0: print(i, round(time.time()-t), bad, flush=True)
print('done', round(time.time()-t), bad)
