"""Talk to a model: python examples/chat.py MODEL, where MODEL is a Hugging Face folder or a .gguf file."""

import sys
from contextlib import closing

import vkdecode as vk

HELP = "/reset starts over, /exit leaves, /help shows this; Ctrl-C stops an answer"


def answer(conversation: vk.Conversation, text: str) -> None:
    """Print the answer as it comes, then how fast it came; Ctrl-C ends it and keeps what was said."""
    with conversation.send(text) as pieces:
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pieces.close()
    print(f"\n{pieces.result.usage}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        with closing(vk.load(sys.argv[1])) as model, vk.Conversation(model) as conversation:
            print(HELP)
            while (line := input(">>> ").strip()) != "/exit":
                if line == "/reset":
                    conversation.reset()
                elif line == "/help":
                    print(HELP)
                elif line:
                    answer(conversation, line)
    except (EOFError, KeyboardInterrupt):
        print()
    except vk.VkDecodeError as error:
        sys.exit(f"error: {error}")
