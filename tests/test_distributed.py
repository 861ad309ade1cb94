import pytest
from distributed_jobs import compare_context_parallel
from processes import Processes

SCHEMES = ("nope", "sinusoidal", "learned", "rope", "transformer_xl", "shaw", "alibi", "da_transformer")

@pytest.fixture(scope="session")
def pair():
    processes = Processes(2)
    yield processes
    processes.stop()

@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["plain","packed","left"])
def test_cp(pair, family, scheme, kind):
    for how in ({}, {"balanced": True, "checkpointing": True}, {"by_hand": True}):
        if how.get("by_hand"):
            if kind == "packed": continue
            how["length"] = 24
        print(how, pair.run(compare_context_parallel, family, scheme, kind, **how)[0])
