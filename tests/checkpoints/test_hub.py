"""Push to the Hub and load from it: the real client against a small Hub on loopback."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch
from families import tokens
from hub_server import Hub
from situations import patched_model

from hf_posenc.checkpoints import cards
from hf_posenc.checkpoints import hub as hub_module

ROOT = Path(__file__).parents[2]
IDS = tokens(2, 20)
PRELUDE = """
    import os, sys, torch, transformers
    transformers.logging.set_verbosity_error()
    import hf_posenc
    from families import tokens
    from situations import patched_model
    ids = tokens(2, 20)
    def logits(model):
        with torch.no_grad():
            return model(ids, use_cache=False).logits
"""


@torch.no_grad()
def logits(model):
    return model(IDS, use_cache=False).logits


# Imports once, and forks for each piece of code: says the fork's number, waits for a word, says how the fork ended.
FORKING = """
    import json, traceback
    for line in sys.stdin:
        request = json.loads(line)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reading, 1)
            os.chdir(request["folder"])
            for number, name in ((1, "out"), (2, "err")):
                os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            if os.path.islink(os.environ["HF_HOME"]):
                os.unlink(os.environ["HF_HOME"])
            os.makedirs(request["home"], exist_ok=True)
            os.symlink(os.path.abspath(request["home"]), os.environ["HF_HOME"])
            status = 1
            try:
                exec(compile(request["code"], "client", "exec"))
                status = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        print(child, flush=True)
        sys.stdin.readline()
        os.write(writing, b"!")
        os.close(reading), os.close(writing)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """The small Hub, and a process whose forks talk to it; huggingface_hub reads its address when it is imported."""
    folder = tmp_path_factory.mktemp("hub")
    with Hub() as server:
        clients = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(FORKING)],
            env={
                **os.environ,
                **server.environment(str(folder / "home")),
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/helpers")]),
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with clients:
            yield server, clients
            clients.kill()


@pytest.fixture
def hub(running):
    hub, _ = running
    hub.repositories.clear(), hub.blobs.clear(), hub.log.clear()
    hub.victim = None
    return hub


class Client:
    """Code in a process of its own, in a folder, with a home for what huggingface_hub keeps."""

    def __init__(self, clients, code, folder, home):
        self.clients, self.folder = clients, folder
        self.say({"code": textwrap.dedent(code), "folder": str(folder), "home": home})
        self.pid = int(clients.stdout.readline())

    def say(self, what):
        self.clients.stdin.write(json.dumps(what) + "\n")
        self.clients.stdin.flush()

    def run(self):
        """Return status, output and errors."""
        watch = threading.Timer(120, os.kill, (self.pid, signal.SIGKILL))
        watch.start()
        self.say("go")
        status = int(self.clients.stdout.readline())
        watch.cancel()
        return status, (self.folder / "out").read_text(), (self.folder / "err").read_text()


@pytest.fixture
def client(running, hub, tmp_path):
    def start(code, home="home"):
        return Client(running[1], code, tmp_path, home)

    return start


def run(process):
    status, out, err = process.run()
    assert status == 0, err[-2000:]
    return out


def test_push_and_load(hub, client, tmp_path):
    out = run(
        client(
            """
            from huggingface_hub.errors import StrictDataclassFieldValidationError

            model = patched_model("shaw", "llama")
            commit = model.push_to_hub("tester/shaw", private=True, commit_message="first", tags=["mine"])
            print(commit.commit_url)
            loaded = hf_posenc.from_pretrained("tester/shaw")
            assert logits(loaded).equal(logits(model))
            auto = transformers.AutoModelForCausalLM.from_pretrained("tester/shaw")
            assert logits(auto).equal(logits(model))
            print(hf_posenc.inspect("tester/shaw"))
            try:
                transformers.LlamaForCausalLM.from_pretrained("tester/shaw", attn_implementation="eager")
            except StrictDataclassFieldValidationError as error:
                assert "hf_posenc:" in str(error)
            else:
                raise SystemExit("the stock class loaded it")
            """
        )
    )
    assert "/tester/shaw/commit/" in out
    assert "tester/shaw: shaw(max_distance=5" in out
    repository = hub.repositories["tester/shaw"]
    assert repository.private
    assert repository.titles == ["initial commit", "first"]  # everything in one commit
    files = hub.files("tester/shaw")
    assert {"config.json", "generation_config.json", "model.safetensors", "modeling_hf_posenc.py"} < files.keys()
    card = files["README.md"].decode()
    for line in ("library_name: hf_posenc", "- shaw", "- mine", "| `max_distance` | `5` |"):
        assert line in card
    assert {who for _, path, who in hub.log if path.startswith("/api") and "validate" not in path} == {"Bearer hf_test"}


def test_what_is_pushed_after_an_interrupted_save_is_what_loads(hub, client):
    run(
        client(
            """
            from pathlib import Path
            patched_model("shaw", "llama").save_pretrained("folder")
            Path("folder/optimizer.pt").write_bytes(b"not for the Hub")
            model = patched_model("alibi", "llama")
            model.save_pretrained("folder/.hf_posenc-saved")
            assert logits(hf_posenc.from_pretrained("folder")).equal(logits(model))
            assert hf_posenc.inspect("folder").scheme == "alibi"
            from hf_posenc.cli import main
            assert main(["push", "folder", "tester/interrupted", "--private"]) == 0
            assert main(["push", "nowhere", "tester/interrupted"]) == 2
            assert logits(hf_posenc.from_pretrained("tester/interrupted")).equal(logits(model))
            """
        )
    )
    assert b"alibi" in hub.files("tester/interrupted")["config.json"]
    assert "optimizer.pt" not in hub.files("tester/interrupted")


def test_push_over_another_model(hub, client):
    run(
        client(
            """
            patched_model("shaw", "llama").push_to_hub("again")
            model = patched_model("alibi", "llama")
            model.push_to_hub("again", max_shard_size="20KB")
            assert logits(hf_posenc.from_pretrained("tester/again")).equal(logits(model))
            model = patched_model("nope", "llama")
            model.push_to_hub("again")
            assert logits(hf_posenc.from_pretrained("tester/again")).equal(logits(model))
            """
        )
    )
    # No shard of the second, no tag of the first remains beside the third.
    assert [name for name in hub.files("tester/again") if "safetensors" in name] == ["model.safetensors"]


def test_a_card_that_is_there_is_kept(hub, client):
    run(client('patched_model("alibi", "llama").push_to_hub("kept")'))
    repository = hub.repositories["tester/kept"]
    text = b"---\nlicense: mit\ntags:\n- stories\n---\n\nWritten by hand.\n"
    repository.put("main", {**hub.files("tester/kept"), "README.md": text}, "card")
    run(client('patched_model("alibi", "llama").push_to_hub("kept")', home="other"))
    card = hub.files("tester/kept")["README.md"].decode()
    assert "Written by hand." in card
    for line in ("license: mit", "- stories", "- hf_posenc", "- alibi", "library_name: hf_posenc"):
        assert line in card


def test_a_revision_a_token_and_a_push_while_saving(hub, client):
    run(
        client(
            """
            model = patched_model("alibi", "llama")
            model.push_to_hub("branched", revision="trial", token="hf_other")
            assert logits(hf_posenc.from_pretrained("tester/branched", revision="trial")).equal(logits(model))
            model.save_pretrained("folder", push_to_hub=True, repo_id="saved", commit_message="by save")
            """
        )
    )
    assert "model.safetensors" in hub.files("tester/branched", "trial")
    assert hub.files("tester/branched", "main") == {}
    assert ("Bearer hf_other") in {who for _, path, who in hub.log if "/commit/" in path}
    assert hub.repositories["tester/saved"].titles[-1] == "by save"


def test_a_pushed_card_loads_from_where_it_is(hub, client, tmp_path):
    """A recipe's card and the package's own: no folder in the example, and no placeholder."""
    patched_model("alibi", "llama").save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    (tmp_path / "model/README.md").write_text(f'Written by hand.\n\nmodel = hf_posenc.from_pretrained("{folder}")\n')
    run(
        client(
            f"""
            from hf_posenc.checkpoints import hub
            from pathlib import Path
            hub.push(Path({folder!r}), "branched", revision="trial")
            patched_model("alibi", "llama").push_to_hub("made")
            """
        )
    )
    branched = hub.files("tester/branched", "trial")["README.md"].decode()
    loading = 'model = hf_posenc.from_pretrained("tester/branched", revision="trial")'
    assert branched.endswith(f"Written by hand.\n\n{loading}\n")
    made = hub.files("tester/made")["README.md"].decode()
    assert 'model = hf_posenc.from_pretrained("tester/made")' in made
    assert "FOLDER_OR_HUB_ID" not in made


def test_the_packages_card_escapes():
    scheme = {"scheme": "alibi", "slopes": "a|b`c`<script>"}
    entry = {"schemes": [scheme], "hf_posenc_version": "0<script>"}
    card = cards.card({"model_type": "posenc_<b>llama", "position_encoding": entry})
    assert "| `slopes` | ``'a\\|b`c`<script>'`` |" in card  # within a code span it is shown
    assert "0&lt;script&gt;" in card
    assert "# &lt;b&gt;llama with alibi positions" in card
    assert "<script>" not in card.replace("<script>'``", "")


HOSTILE = [
    "<script>alert(1)</script> a|b",
    "`a` ``b`` ```",
    "- item",
    "# head #",
    "*a* _b_ __c__ **d** ~~e~~ [a](b) ![c](d) [e]: f",
    "&lt;b&gt; &amp; back\\slash \\| \\` $x^2$",
    "---\nlicense: mit\n---",
    "```\n<b>\n```",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_values_are_shown_by_an_independent_parser_as_they_are(value):
    """In a paragraph, a heading and a cell, as text and as code: what markdown-it reads is the value and nothing else."""
    parser = (
        pytest.importorskip("markdown_it", reason="pip install markdown-it-py runs this").MarkdownIt().enable("table")
    )
    line = " ".join(value.split())

    def read(text, *kinds, shown="text"):
        parsed = parser.parse(text)
        assert {token.type.removesuffix("_open") for token in parsed if token.nesting == 1} == set(kinds)
        inline = [token.children for token in parsed if token.type == "inline"]
        assert {child.type for children in inline for child in children} <= {"text", shown}
        return ["".join(child.content for child in children) for children in inline]

    cell = ("table", "thead", "tbody", "tr", "th", "td")
    plain, code = cards.plain(value), cards.code(value)
    assert read(plain, "paragraph") == read(f"# {plain}", "heading") == [line]
    assert read(f"| a | b |\n|---|---|\n| {plain} | c |", *cell) == ["a", "b", line, "c"]
    assert read(code, "paragraph", shown="code_inline") == [line]
    table = "| a | b |\n|---|---|\n| {} | c |".format(code.replace("|", "\\|"))
    assert read(table, *cell, shown="code_inline") == ["a", "b", line, "c"]
    (block,) = parser.parse(cards.fenced(value))
    assert (block.type, block.content) == ("fence", f"{value}\n")


def test_what_cannot_be_printed_is_an_escape():
    """A file's name that is no text, a terminal's colours, a change of direction: each would be shown as something else."""
    said = r"\udcff \x1b[31m \u202e \x00"
    assert cards.code("\udcff \x1b[31m \u202e \x00") == f"`{said}`"
    assert cards.fenced("\udcff \x1b[31m \u202e \x00") == f"```\n{said}\n```"


def test_the_packages_card_says_which_layers_have_which_scheme():
    alibi = {"scheme": "alibi", "layers": [0, 2], "window": 8}
    entry = {"schemes": [alibi, {"scheme": "nope", "layers": "1::2", "window": None}], "hf_posenc_version": "1"}
    card = cards.card({"model_type": "posenc_llama", "position_encoding": entry})
    assert "`alibi` is for layers `0, 2`. `nope` is for layers `1::2`. Layers that are not named keep the" in card
    assert "| `window` | `8` |" in card
    assert card.count("`window`") == 1


def test_a_stock_checkpoint_is_not_pushed(tmp_path):
    from families import tiny

    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a stock llama checkpoint"):
        hub_module.push(tmp_path, "tester/stock")


PUSH = 'patched_model("alibi", "llama").push_to_hub("tester/killed", max_shard_size="20KB")'


def kill_at(hub, client, request):
    """Kill a push when its n-th request arrives; return whether it had changed what can be read."""
    before = dict(hub.files("tester/killed"))
    hub.log.clear()
    hub.kill_at = request
    process = client(PUSH, home=f"home{request}")
    hub.victim = process.pid
    status, _, _ = process.run()
    hub.victim = None
    assert status == -signal.SIGKILL
    assert dict(hub.files("tester/killed")) == before
    run(
        client(
            'hf_posenc.from_pretrained("tester/killed").config.position_encoding["schemes"][0]["scheme"] == "shaw" or 1 / 0'
        )
    )


def test_a_killed_push_changes_nothing(hub, client):
    """Killed at its second upload."""
    run(client('patched_model("shaw", "llama").push_to_hub("tester/killed")'))
    hub.log.clear()
    run(client(PUSH.replace("killed", "whole"), home="whole"))
    uploads = [n for n, (_, path, _) in enumerate(hub.log, 1) if path.startswith("/lfs/")]
    kill_at(hub, client, uploads[1])
