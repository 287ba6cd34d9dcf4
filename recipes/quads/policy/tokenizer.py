"""A character tokenizer with a chat template, small enough to read whole."""

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>")
CHARACTERS = "0123456789+-=;"
VOCAB_SIZE = 32

# A turn is `<|role|>content`; the assistant's turns end with <eos>, and generation starts after `<|assistant|>`.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<eos>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def vocabulary() -> dict[str, int]:
    """Token -> id: the special tokens, the task's characters, then unused ones up to VOCAB_SIZE."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    tokens += [f"<unused{i}>" for i in range(len(tokens), VOCAB_SIZE)]
    return {token: i for i, token in enumerate(tokens)}


def build_tokenizer():
    """Returns a transformers fast tokenizer: one token a character, with the chat template set."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel(vocabulary(), unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<|system|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
