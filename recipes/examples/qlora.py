"""Swap, calibrate, quantise, and train an adapter: QLoRA with TRL's SFTTrainer.

    python recipes/examples/qlora.py --bits 8                       # a tiny model, made on the spot; on a CPU as well
    python recipes/examples/qlora.py --model meta-llama/Llama-3.2-1B --data lines.txt --output runs/qlora

Run it in a clone, after `pip install -e '.[recipes,trl,qlora]'` there. Calibration writes into the projections of queries
and keys, so it comes before they are packed into few bits. The adapter holds the scheme's parameters too. At the end it is
put onto the calibrated model in full precision and merged, which gives a checkpoint without an adapter.
"""

from pathlib import Path

from peft import prepare_model_for_kbit_training
from sft_trainer import arguments, settings, stock, texts, windows
from transformers import BitsAndBytesConfig, TorchAoConfig
from trl import SFTTrainer

import hf_posenc


def quantization(bits):
    """Return the config of 4 bits (NF4 by bitsandbytes) or 8 bits (int8 by torchao)."""
    if bits == 4:
        return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig(version=2))


def main(argv=None):
    """Patch, calibrate, quantise, train an adapter, save and merge it; return the trainer."""
    parser = arguments(argv, __doc__.split("\n")[0])
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.set_defaults(output="runs/qlora")
    options = parser.parse_args(argv)
    tokenizer, whole = stock(options.model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    data = texts(options.data)
    text = windows(whole, tokenizer, data)
    hf_posenc.patch_model(whole, options.scheme, seed=0)
    print(hf_posenc.calibrate(whole, text, matching=hf_posenc.Matching(steps=50)))
    calibrated = Path(options.output) / "calibrated"
    whole.save_pretrained(calibrated, tokenizer=tokenizer)

    model = hf_posenc.from_pretrained(calibrated, quantization_config=quantization(options.bits))
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    trainer = SFTTrainer(
        model,
        args=settings(options),
        train_dataset=data,
        processing_class=tokenizer,
        peft_config=hf_posenc.lora_config(model, r=options.rank),
    )
    trainer.train()
    adapter = Path(options.output) / "adapter"
    trainer.save_model(str(adapter))

    merged = hf_posenc.load_adapter(whole, adapter).merge_and_unload()
    merged.save_pretrained(Path(options.output) / "model", tokenizer=tokenizer)
    print(hf_posenc.inspect(Path(options.output) / "model"))
    return trainer


if __name__ == "__main__":
    main()
