from __future__ import annotations
import time, threading
from collections import Counter
from tests.faults.s3_runs import *
from tests.faults.test_s3_storms import bad_line
from concurrent.futures import ThreadPoolExecutor
def test_x(place: Place) -> None:
    store = place.history(deadline_s=60).store
    t0=time.perf_counter(); c0=time.process_time()
    bad_line(place, key=LEDGER, seed=11)
    def write(who):
        h=History(store)
        for k in range(2):
            try: commit(h, who*100+k)
            except Exception as e: print(repr(e)[:100])
            print(who, k, round(time.perf_counter()-t0,1), flush=True)
    with ThreadPoolExecutor(16) as t: list(t.map(write, range(16)))
    print(time.perf_counter()-t0, time.process_time()-c0, Counter(x.operation for x in place.chaos.log), len(place.chaos.log))
