"""`transformers serve` for a patched checkpoint.

    python recipes/examples/serve.py runs/gpt2-alibi/model --port 8000
    transformers chat runs/gpt2-alibi/model http://localhost:8000/v1       # in another terminal

That server looks the class of a checkpoint up by its name among those of transformers, and finds none there for a patched
one. This puts it there, and starts the server. Needs `pip install 'transformers[serving]'`.
"""

import argparse

import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig
from transformers.cli.serve import Serve

import hf_posenc


def main(argv=None, **options):
    """Serve one checkpoint until it is interrupted. The options are those of `transformers serve`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="folder or Hub id of a patched checkpoint")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args(argv)
    print(hf_posenc.inspect(asked.checkpoint))
    served = MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.from_pretrained(asked.checkpoint))]
    setattr(transformers, served.__name__, served)
    return Serve(force_model=asked.checkpoint, port=asked.port, **options)


if __name__ == "__main__":
    main()
