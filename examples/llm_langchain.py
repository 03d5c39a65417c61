"""A LangChain model that waits for a limit shared by all processes. Run it with `python examples/llm_langchain.py`."""

from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage

from headgate import Limiter
from headgate.llm.langchain import RequestLimiter

limiter = Limiter("10/second", name="openai", store="sqlite:///limits.db")  # or redis://…
answers = iter([AIMessage("hello")] * 12)
model = GenericFakeChatModel(messages=answers, rate_limiter=RequestLimiter(limiter))  # or init_chat_model(…)
for _ in range(12):
    model.invoke("Say hello.")
print("12 answers")
