import asyncio, time
from tests.conftest import *
from tests.unit.trigger.processes import *
async def test_x(kafka_settings):
    t=time.time()
    def p(w): print(f"{time.time()-t:.2f} {w}", flush=True)
    async with peer_on(kafka_settings) as peer:
        p("peer")
        for i in range(2):
            tr=RunningTrigger(Settings(kafka=kafka_settings))
            await until(lambda: tr.ready); p("ready")
            await until(lambda: tr.count("budget_bytes")); p("budget")
            await tr.stop(); p("stopped")
