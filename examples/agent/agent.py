"""An agent with two calls in one conversation: the digits reversed, then the answer reversed again, which must give
back what it began with. It calls OpenAI's API; what it returns is its reward."""


async def run(row, endpoint):
    client = endpoint.client()
    messages = []

    async def ask(text):
        messages.append({"role": "user", "content": f"reverse {text}"})
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages.append(answer.choices[0].message)
        return answer.choices[0].message.content

    answer = await ask(row.prompt)
    back = await ask(answer)
    return {"right": float(answer == row.answer), "back": 0.5 * (back == row.prompt)}
