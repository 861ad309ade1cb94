"""QLoRA on a patched model: a base kept in 4 or 8 bits, and an adapter with the scheme's parameters in it.

    python recipes/examples/qlora.py --bits 8                       # a tiny model, made on the spot; on a CPU as well
    python recipes/examples/qlora.py --model meta-llama/Llama-3.2-1B --data lines.txt --output runs/qlora

Needs `pip install 'hf_posenc[recipes,trl,qlora]'`. The adapter is what is saved. At the end it is put onto the base in
full precision and merged, which gives a checkpoint for whoever has no use for an adapter.
"""

import tempfile
from pathlib import Path

import torch
from peft import prepare_model_for_kbit_training
from sft_trainer import arguments, settings, stock, texts
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig
from trl import SFTTrainer

import hf_posenc


def quantization(bits):
    """4: NF4 by bitsandbytes. 8: int8 by torchao."""
    if bits == 4:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


def main(argv=None):
    """Quantises, patches, trains an adapter, saves and merges it; returns the trainer."""
    parser = arguments(argv, __doc__.split("\n")[0])
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.set_defaults(output="runs/qlora")
    options = parser.parse_args(argv)
    tokenizer, whole = stock(options.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    with tempfile.TemporaryDirectory() as folder:
        name = options.model
        if name is None:
            name = folder
            whole.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=quantization(options.bits))
    torch.manual_seed(0)
    hf_posenc.patch_model(model, options.scheme)
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    trainer = SFTTrainer(
        model,
        args=settings(options),
        train_dataset=texts(options.data),
        processing_class=tokenizer,
        peft_config=hf_posenc.lora_config(model, r=options.rank),  # before the adapter the model has to be patched
    )
    trainer.train()
    adapter = Path(options.output) / "adapter"
    trainer.save_model(str(adapter))

    hf_posenc.patch_model(whole, options.scheme)
    merged = hf_posenc.load_adapter(whole, adapter).merge_and_unload()
    merged.save_pretrained(Path(options.output) / "model", tokenizer=tokenizer)
    print(hf_posenc.inspect(Path(options.output) / "model"))
    return trainer


if __name__ == "__main__":
    main()
